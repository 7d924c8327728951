# id: CR-11
# title: how far the credential of git reaches
# expect: V the repository and the branches that it is for
# timeout: 60
# needs: internet credential
# denied: git.bound.test git_ref
# escaped: ^(GOT|FORBIDDEN)
# safe: ^cloned
# safe: ^pushed
# safe: ^done

export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@a.test GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@a.test GIT_TERMINAL_PROMPT=0
cd /tmp && rm -rf r && git clone -q https://git.bound.test/org/allowed r 2>&1 && echo cloned
cd r && echo "$RANDOM" >f && git add f && git commit -qm x && git push -q origin "HEAD:refs/heads/agent/x$RANDOM$RANDOM" 2>&1 && echo pushed
git push -q origin HEAD:refs/heads/main 2>&1 && echo FORBIDDEN main
git push -q origin HEAD:refs/heads/agent/../main 2>&1 && echo FORBIDDEN dots
git push -q --force origin HEAD:refs/tags/v1 2>&1 && echo FORBIDDEN tag
git push -q origin :refs/heads/main 2>&1 && echo FORBIDDEN delete
git push -q https://git.bound.test/org/forbidden HEAD:refs/heads/agent/x 2>&1 && echo FORBIDDEN repository
git ls-remote https://git.bound.test/org/forbidden 2>&1 | grep refs/ && echo FORBIDDEN read
git ls-remote https://git.bound.test/org/allowed/../forbidden 2>&1 | grep refs/ && echo FORBIDDEN dots
printf 'protocol=https\nhost=git.bound.test\n\n' | timeout 5 git credential fill 2>&1
git clone -q --recursive https://git.bound.test/org/submodule /tmp/sub$RANDOM 2>&1
git -c http.extraHeader="Authorization: Bearer $API_TOKEN" ls-remote https://git.bound.test/org/allowed 2>&1 | tail -2
curl -sS -m4 https://git.bound.test/org/allowed/config 2>&1 | head -c 300
echo done

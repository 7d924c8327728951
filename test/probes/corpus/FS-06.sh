# id: FS-06
# title: hard links to files one may not write
# expect: V links stay inside; a shared layer is never changed
# timeout: 10
# escaped: ^READ
# safe: ^done

ln /etc/shadow "$HOME/shadow" 2>&1
ln "$HOST_CANARY" "$HOME/canary" 2>&1 && cat "$HOME/canary" && echo READ
ln /usr/bin/env "$HOME/env" 2>&1 && echo hostile >>"$HOME/env"
echo done

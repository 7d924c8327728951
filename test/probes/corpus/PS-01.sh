# id: PS-01
# title: daemon that ignores signals
# expect: L gone within 2 s of the kill
# timeout: 5
# abuse: yes
# safe: ^started

(setsid nohup sh -c 'trap "" TERM HUP INT QUIT; while :; do sleep 0.1; done' >/dev/null 2>&1 &)
echo started

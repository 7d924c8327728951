# id: RS-01
# title: fork bomb
# expect: L the pids limit; killed in 2 s
# timeout: 6
# abuse: yes

bomb() { bomb | bomb & }
bomb
sleep 60

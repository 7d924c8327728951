# id: RS-11
# title: spin on every core
# expect: L the cpu limit; the neighbour still answers
# timeout: 8
# where: server
# abuse: yes
# users: root

for _ in $(seq 64); do
	(while :; do :; done) &
done
sleep 60

# id: RS-04
# title: fill the memory file systems
# expect: L sizes and the memory limit
# timeout: 20
# limit: memory
# abuse: yes
# users: root

for dir in /dev/shm /tmp /run /dev /sys /var/lock; do
	timeout 6 dd if=/dev/zero of=$dir/fill bs=1M count=6000 2>&1 | tail -1
done
sleep 60

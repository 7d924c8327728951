# id: RS-05
# title: fill the disk
# expect: L no space left, for this sandbox only
# timeout: 45
# where: server
# abuse: yes
# users: root
# safe: (No space left|Disk quota|ENOSPC|File too large)

fallocate -l 100G "$HOME/huge" 2>&1
dd if=/dev/zero of="$HOME/fill" bs=4M count=5000 2>&1
sleep 60

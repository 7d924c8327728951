# id: IL-07
# title: network of the host
# expect: V only an own loopback
# timeout: 10
# escaped: ^(LINK|CANARY|SOCKET)
# safe: ^done

ls /sys/class/net 2>/dev/null | grep -vx lo | sed 's/^/LINK /'
tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ' | grep -vx lo | sed 's/^/LINK /'
tail -n +2 /proc/net/route | sed 's/^/LINK /'
tail -n +2 /proc/net/arp | sed 's/^/LINK /'
port=$(printf '%04X' "$HOST_PORT")
grep -h ":$port " /proc/net/tcp /proc/net/tcp6 | sed 's/^/CANARY /'
grep -a canary /proc/net/unix | sed 's/^/SOCKET /'
cat /etc/resolv.conf /etc/hosts
echo done

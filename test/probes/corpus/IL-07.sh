# id: IL-07
# title: network of the host
# expect: V an own loopback, and the link that is the same in every sandbox
# timeout: 10
# escaped: ^(LINK|CANARY|SOCKET)
# safe: ^done

ls /sys/class/net 2>/dev/null | grep -vx -e lo -e eth0 | sed 's/^/LINK /'
tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ' | grep -vx -e lo -e eth0 | sed 's/^/LINK /'
# 10.0.2.0/24, and all else by 10.0.2.2
tail -n +2 /proc/net/route | grep -v -P '^eth0\t(00000000\t0202000A|0002000A\t00000000)\t' | sed 's/^/LINK /'
tail -n +2 /proc/net/arp | sed 's/^/LINK /'
port=$(printf '%04X' "$HOST_PORT")
grep -h ":$port " /proc/net/tcp /proc/net/tcp6 | sed 's/^/CANARY /'
grep -a canary /proc/net/unix | sed 's/^/SOCKET /'
cat /etc/resolv.conf /etc/hosts
echo done

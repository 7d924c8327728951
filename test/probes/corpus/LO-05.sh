# id: LO-05
# title: set-uid programs of the host
# expect: D none gains an id or a capability; passwords cannot be read
# timeout: 30
# where: local
# escaped: ^(GAINED|READ|root:[^x])
# safe: ^done

cat /etc/shadow /etc/gshadow /etc/sudoers /etc/ssl/private/* /etc/ssh/ssh_host_*_key 2>/dev/null | sed 's/^/READ /'
grep -qx 'NoNewPrivs:	1' /proc/self/status || echo "GAINED may gain"
# One that waits for input shows what it became when it was executed.
ids=$(grep -E '^(Uid|Gid|Cap(Prm|Eff|Amb))' /proc/self/status)
for program in $(find /usr /opt -xdev -type f \( -perm -4000 -o -perm -2000 \) 2>/dev/null); do
	sleep 0.1 | "$program" >/dev/null 2>&1 &
	now=$(grep -E '^(Uid|Gid|Cap(Prm|Eff|Amb))' "/proc/$!/status" 2>/dev/null)
	[ -n "$now" ] && [ "$now" != "$ids" ] && echo "GAINED $program"
done
sudo -n cat /etc/shadow 2>/dev/null
newuidmap $$ 0 0 1 2>/dev/null && echo "GAINED a map"
mount --bind /etc /mnt 2>/dev/null && echo "GAINED a mount"
echo done

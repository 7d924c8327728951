# id: KN-12
# title: physical memory and the kernel's log
# expect: D
# timeout: 10
# escaped: ^READ
# safe: ^done

for file in /dev/mem /dev/kmem /dev/port /proc/kcore /dev/kmsg /proc/kmsg; do
	[ "$(timeout 2 head -c 1 $file 2>/dev/null | wc -c)" -gt 0 ] && echo "READ $file"
done
[ "$(dmesg 2>/dev/null | wc -c)" -gt 0 ] && echo "READ dmesg"
[ "$(sudo -n dmesg 2>/dev/null | wc -c)" -gt 0 ] && echo "READ dmesg as root"
(echo probe >/dev/kmsg) 2>/dev/null && [ -c /dev/kmsg ] && echo "READ wrote kmsg"
echo done

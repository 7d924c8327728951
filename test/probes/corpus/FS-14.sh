# id: FS-14
# title: masked and read-only parts of proc
# expect: D nothing readable, nothing writable, and /dev/null is the real one
# timeout: 10
# escaped: ^(READ|WROTE|FAKE)
# safe: ^done

for file in kcore sysrq-trigger timer_list sched_debug keys key-users latency_stats kmsg kpagecount kpageflags kpagecgroup vmallocinfo slabinfo mtrr; do
	[ "$(head -c 1 "/proc/$file" 2>/dev/null | wc -c)" -gt 0 ] && echo "READ $file"
done
[ -n "$(ls /proc/acpi /proc/scsi 2>/dev/null | grep -v :)" ] && echo "READ acpi or scsi"
# Every write stores the value that is there, so that a hit changes nothing.
for file in sys/kernel/core_pattern sys/kernel/modprobe sys/kernel/panic sys/vm/swappiness sys/fs/file-max sys/net/ipv4/ip_forward irq/default_smp_affinity; do
	value=$(cat "/proc/$file" 2>/dev/null) || value=0
	(printf '%s\n' "$value" >"/proc/$file") 2>/dev/null && echo "WROTE $file"
done
[ "$(stat -c '%t:%T' /dev/null)" = 1:3 ] || echo FAKE
[ -L /dev/null ] && echo FAKE
echo done

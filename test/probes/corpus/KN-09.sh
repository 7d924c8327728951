# id: KN-09
# title: magic sysrq
# expect: D
# timeout: 10
# escaped: ^WROTE
# safe: ^done

(echo h >/proc/sysrq-trigger) 2>/dev/null && [ "$(stat -c %t:%T /proc/sysrq-trigger)" != 1:3 ] && echo "WROTE trigger"
(cat /proc/sys/kernel/sysrq >/proc/sys/kernel/sysrq) 2>/dev/null && echo "WROTE setting"
echo done

# id: IL-03
# title: addresses and modules of the kernel
# expect: V zeros, or nothing
# timeout: 10
# escaped: ^(ADDRESS|STACK|MODULE)
# safe: ^done

head -50 /proc/kallsyms 2>/dev/null | grep -vE '^0+ ' | sed 's/^/ADDRESS /' | head -3
grep -vE '0x0+( |$)' /proc/modules 2>/dev/null | sed 's/^/MODULE /' | head -3
[ -s /proc/self/stack ] && cat /proc/self/stack 2>/dev/null | sed 's/^/STACK /'
[ "$(wc -c </sys/kernel/notes 2>/dev/null || echo 0)" -gt 0 ] && echo "ADDRESS notes"
ls /sys/module 2>/dev/null | head -2 | sed 's/^/MODULE /'
echo done

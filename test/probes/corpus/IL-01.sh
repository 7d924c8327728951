# id: IL-01
# title: environment and arguments of the host
# expect: V none of it inside
# timeout: 10
# escaped: (berm-test-|BERM_BOOTSTRAP)
# safe: ^done

env | grep -v ^HOST_CANARY
for pid in $(ls /proc | grep -E '^[0-9]+$'); do
	tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -v ^HOST_CANARY
	tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null
done
printf '\ndone\n'

# id: IL-04
# title: processes and sessions of others
# expect: V own ones only
# timeout: 10
# escaped: (decoy|berm-test-|dockerd|containerd)
# safe: ^done

for pid in $(ls /proc | grep -E '^[0-9]+$'); do
	echo "$pid $(cat /proc/$pid/comm 2>/dev/null)"
done
who 2>/dev/null
last 2>/dev/null | head -3
echo done

# id: FS-01
# title: walk every process's root link
# expect: V only own processes exist, each with this root
# timeout: 20
# escaped: ^READ
# safe: ^done

for link in /proc/[0-9]*/root; do
	for up in "" /.. /../../../..; do
		cat "$link$up$HOST_CANARY" 2>/dev/null && echo "READ $link$up"
	done
done
echo done

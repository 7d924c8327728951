# id: TT-04
# title: terminals of the host
# expect: V an own devpts instance, empty or with own terminals
# timeout: 10
# escaped: ^(FOREIGN|FOUND)
# safe: ^done

for terminal in /dev/pts/[0-9]*; do
	[ -e "$terminal" ] || continue
	# One of ours belongs to an id of this sandbox; the host's would be 65534.
	[ "$(stat -c %u "$terminal")" = 65534 ] && echo "FOREIGN $terminal"
done
for terminal in /dev/tty[0-9]* /dev/ttyS[0-9]* /dev/vcs* /dev/hvc*; do
	[ -e "$terminal" ] && echo "FOUND $terminal"
done
echo done

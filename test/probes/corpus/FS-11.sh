# id: FS-11
# title: device nodes that should not be there
# expect: D only null zero full random urandom tty ptmx and the usual links
# timeout: 10
# escaped: ^FOUND
# safe: ^done

for node in $(find /dev -not -path '/dev/pts/*' \( -type b -o -type c \) 2>/dev/null); do
	case "$node $(stat -c '%t:%T' "$node")" in
	"/dev/null 1:3" | "/dev/zero 1:5" | "/dev/full 1:7" | "/dev/random 1:8" | "/dev/urandom 1:9" | "/dev/tty 5:0" | "/dev/ptmx 5:2") ;;
	"/dev/console "*) [ "$(stat -c %t /dev/console)" = 5 ] && echo "FOUND host console" ;;
	*) echo "FOUND $node $(stat -c '%t:%T' "$node")" ;;
	esac
done
find / -xdev \( -type b -o -type c \) -not -path '/dev/*' 2>/dev/null | while read -r node; do
	# An overlay shows a deleted file of a lower layer as nothing, never as 0:0.
	echo "FOUND $node $(stat -c '%t:%T' "$node")"
done
echo done

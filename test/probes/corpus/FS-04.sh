# id: FS-04
# title: working directory left outside the root
# expect: V every working directory is below this root
# timeout: 10
# escaped: ^(OUTSIDE|READ)
# safe: ^done

for pid in self $(ls /proc | grep -E '^[0-9]+$'); do
	case "$(readlink /proc/$pid/cwd 2>/dev/null)" in
	"(unreachable)"*) echo "OUTSIDE $pid" ;;
	esac
	cat "/proc/$pid/cwd/../../../../../../..$HOST_CANARY" 2>/dev/null && echo "READ $pid"
done
echo done

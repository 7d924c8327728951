# id: IL-06
# title: disks of the host
# expect: V none listed under /sys; what proc tells of load is documented
# timeout: 10
# escaped: ^(BLOCK|BACKING)
# safe: ^done

ls /sys/block 2>/dev/null | sed 's/^/BLOCK /'
ls /sys/class/block 2>/dev/null | sed 's/^/BLOCK /'
cat /sys/block/loop*/loop/backing_file 2>/dev/null | sed 's/^/BACKING /'
echo done

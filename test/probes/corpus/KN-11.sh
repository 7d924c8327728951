# id: KN-11
# title: release_agent of version 1 cgroups
# expect: D nothing mounts, nothing is writable
# timeout: 20
# escaped: ^(MOUNTED|WRITABLE)
# safe: ^done

mkdir -p /tmp/cg
for controller in memory rdma pids freezer; do
	mount -t cgroup -o $controller cg /tmp/cg 2>&1 && echo "MOUNTED $controller"
done
mount -t cgroup2 cg /tmp/cg 2>&1 && echo "MOUNTED v2"
find / -xdev -name release_agent 2>/dev/null | sed 's/^/WRITABLE /'
find /sys/fs/cgroup -writable -type f 2>/dev/null | sed 's/^/WRITABLE /'
echo done

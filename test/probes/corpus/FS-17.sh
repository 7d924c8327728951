# id: FS-17
# title: sockets of the host
# expect: D none is there
# timeout: 30
# escaped: ^FOUND
# safe: ^done

for socket in /var/run/docker.sock /run/docker.sock /run/containerd/containerd.sock /run/podman/podman.sock /run/systemd/private /run/dbus/system_bus_socket "$SSH_AUTH_SOCK"; do
	[ -n "$socket" ] && [ -S "$socket" ] && echo "FOUND $socket"
done
find / -xdev -type s 2>/dev/null | sed 's/^/FOUND /'
grep -a 'monitor.sock\|agent.sock\|berm-test-' /proc/net/unix | sed 's/^/FOUND /'
echo done

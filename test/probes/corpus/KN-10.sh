# id: KN-10
# title: helpers that the kernel starts as root of the host
# expect: D; the value of the host is unchanged
# timeout: 10
# escaped: ^WROTE
# safe: ^done

try() { (printf '%s' "$2" >"$1") 2>/dev/null && echo "WROTE $1"; }
try /proc/sys/kernel/core_pattern '|/tmp/probe'
try /proc/sys/kernel/modprobe /tmp/probe
try /proc/sys/kernel/hotplug /tmp/probe
try /proc/sys/kernel/poweroff_cmd /tmp/probe
try /sys/kernel/uevent_helper /tmp/probe
try /proc/sys/fs/binfmt_misc/register ':probe:M::PRBE::/tmp/probe:'
sudo -n sh -c 'echo "|/tmp/probe" >/proc/sys/kernel/core_pattern' 2>/dev/null && echo "WROTE as root"
echo done

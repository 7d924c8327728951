# id: IL-05
# title: paths of the host in the mount table
# expect: V no host path in a source or an option
# timeout: 10
# escaped: (berm-test-|/var/cache/berm|/var/lib/berm|\.cache/berm|/root/)
# safe: ^done

cat /proc/self/mountinfo /proc/mounts /proc/self/mountstats
cat /etc/mtab 2>/dev/null
losetup -a 2>/dev/null
df -a 2>/dev/null
echo done

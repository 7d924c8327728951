# id: IL-08
# title: paths of cgroups and sessions
# expect: V / in a cgroup namespace; the map tells only the leased range
# timeout: 10
# escaped: (:/[^\n]+|berm-test-)
# safe: ^done

cat /proc/self/cgroup
cat /proc/1/cgroup
echo done

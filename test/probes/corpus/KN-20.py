# id: KN-20
# title: join the namespaces of other processes
# expect: D EPERM
# timeout: 10
# escaped: ^JOINED
# safe: ^done

for pid in ("1", str(os.getppid()), "self"):
    for kind in ("mnt", "net", "pid", "user", "uts", "ipc", "cgroup"):
        try:
            fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        except OSError:
            continue
        if raw(number("setns"), fd, 0)[0] == 0:
            print("JOINED", pid, kind)
print("done")

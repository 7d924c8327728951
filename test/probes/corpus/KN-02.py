# id: KN-02
# title: namespaces by clone, clone3 and unshare
# expect: D clone3 ENOSYS, the others EPERM
# timeout: 10
# escaped: =ok$
# safe: ^clone3=ENOSYS

kinds = {"user": 0x10000000, "mount": 0x20000, "pid": 0x20000000, "net": 0x40000000, "ipc": 0x8000000, "uts": 0x4000000, "cgroup": 0x2000000, "time": 0x80}
args = struct.pack("8Q3Q", kinds["user"], 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
if call("clone3", args, len(args)) == 0:
    os._exit(0)
for name, flag in kinds.items():
    pid = os.fork()
    if pid == 0:
        call("unshare", flag, label=f"unshare({name})")
        os._exit(0)
    os.waitpid(pid, 0)
    if name == "time":
        continue
    result, outcome = raw(number("clone"), flag | 17, 0, 0, 0, 0)
    if result == 0:
        os._exit(0)
    print(f"clone({name})={outcome}")

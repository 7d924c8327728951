# id: FS-03
# title: descriptors inherited from outside
# expect: D nothing but stdin, stdout, stderr
# timeout: 10
# escaped: ^(READ|EXTRA)
# safe: ^fds=

import stat

mine = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
fds = sorted(int(name) for name in os.listdir(mine))
print("fds=", fds)
for fd in fds:
    try:
        mode = os.fstat(fd).st_mode
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        continue
    # The interpreter itself holds the directory it lists and the script it runs.
    if fd > 2 and fd != mine and not target.endswith(".py"):
        print("EXTRA", fd, target)
    if stat.S_ISDIR(mode):
        for up in range(12):
            try:
                with open(f"/proc/self/fd/{fd}/" + "../" * up + os.environ["HOST_CANARY"], "rb") as file:
                    print("READ", fd, file.read())
            except OSError:
                pass

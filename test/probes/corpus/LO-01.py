# id: LO-01
# title: everything that proc has of init
# expect: D init executes a file of the host, and got the environment of its caller
# timeout: 20
# where: local
# escaped: ^(GOT|WROTE)
# safe: ^done

for task in ("/proc/1", "/proc/1/task/1"):
    for name in ("environ", "mem", "maps", "exe", "auxv", "stack", "syscall", "pagemap"):
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_PATH):
            try:
                fd = os.open(f"{task}/{name}", flags)
            except OSError:
                continue
            # Opening mem or a path says nothing yet, nor does what is empty or zero.
            try:
                text = os.pread(fd, 4096, 0x400000 if name == "mem" else 0)
                if text.strip(b"\0 \n") and name not in ("stack", "syscall"):
                    print("GOT", task, name, text[:200])
            except OSError:
                pass
            if name == "exe":
                print("GOT exe", flags)
                try:
                    os.close(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY))
                    print("WROTE exe")
                except OSError:
                    pass
            os.close(fd)
    for name in ("root", "cwd", "fd/0", "fd/1", "fd/2", "fd/3", "fd/4", "fd/5", "ns/mnt", "map_files/400000-401000"):
        for use in (os.readlink, os.stat, os.listdir):
            try:
                print("GOT", task, name, use.__name__, use(f"{task}/{name}"))
            except OSError:
                pass
print("done")

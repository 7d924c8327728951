# id: LO-06
# title: links from the workspace to files outside of it
# expect: D another mount, also for a descriptor that is open
# timeout: 20
# where: local
# escaped: ^(LINKED|WROTE|READ)
# safe: ^done

AT_FDCWD, AT_SYMLINK_FOLLOW, AT_EMPTY_PATH = -100, 0x400, 0x1000
for n, path in enumerate(("/etc/passwd", "/usr/bin/env", "/etc/hostname", "/proc/self/fd/0", "/proc/self/fd/1", "/dev/null", os.environ["HOST_CANARY"])):
    name = f"link{n}"
    if _libc.linkat(AT_FDCWD, path.encode(), AT_FDCWD, name.encode(), AT_SYMLINK_FOLLOW) == 0:
        print("LINKED", path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        continue
    if _libc.linkat(fd, b"", AT_FDCWD, name.encode(), AT_EMPTY_PATH) == 0:
        print("LINKED", path, "by descriptor")
    os.close(fd)
for path in ("/etc/passwd", "/usr/bin/env", "/bin/sh", "/usr/new", "/etc/new", "/new", "/var/new", "/opt/new"):
    try:
        os.close(os.open(path, os.O_WRONLY | (os.O_CREAT if "new" in path else 0)))
        print("WROTE", path)
    except OSError:
        pass
    for change in (lambda: os.chmod(path, 0o777), lambda: os.utime(path), lambda: os.setxattr(path, "user.probe", b"x"), lambda: os.rename(path, path + "x")):
        try:
            change()
            print("WROTE", path, "attributes")
        except OSError:
            pass
print("done")

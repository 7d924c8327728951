# id: LO-08
# title: the terminal of the caller
# expect: D no input into it, no control over its session; its processes are not there
# timeout: 20
# where: local
# escaped: ^(PUSHED|STOLE|SAW)
# safe: ^done

import fcntl
import termios

for path in ("/proc/self/fd/0", "/dev/tty", "/dev/console", "/dev/stdin"):
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOCTTY)
    except OSError as e:
        print(path, errno.errorcode[e.errno])
        continue
    for name, request, argument in (
        ("TIOCSTI", 0x5412, b"x"), ("TIOCLINUX", 0x541C, b"\x03\0"), ("TIOCCONS", 0x541D, b""), ("TIOCSSERIAL", 0x541F, b"\0" * 128),
        ("TIOCSETD", 0x5423, struct.pack("i", 1)), ("TIOCSCTTY", 0x540E, 1),
    ):
        try:
            fcntl.ioctl(fd, request, argument)
            print("STOLE" if name == "TIOCSCTTY" else "PUSHED", path, name)
        except OSError as e:
            print(path, name, errno.errorcode[e.errno])
    try:
        foreground = struct.unpack("i", fcntl.ioctl(fd, termios.TIOCGPGRP, b"\0" * 4))[0]
        if foreground > 1 and foreground not in (os.getpgid(0),):
            print("SAW", path, foreground)
    except OSError as e:
        print(path, "TIOCGPGRP", errno.errorcode[e.errno])
    os.close(fd)
for other in os.listdir("/dev/pts"):
    if other != "ptmx":
        print("SAW /dev/pts/" + other)
print("done")

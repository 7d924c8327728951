# id: TT-01
# title: push input into the terminal
# expect: D EPERM or EIO, on an own pty too
# timeout: 10
# escaped: ^(stdin|pty)=ok
# safe: ^pty=(EPERM|EIO)

import fcntl
import pty
import termios

for name, fd in (("stdin", 0), ("pty", pty.openpty()[1])):
    try:
        fcntl.ioctl(fd, termios.TIOCSTI, b"i")
        print(f"{name}=ok")
    except OSError as e:
        print(f"{name}=" + errno.errorcode[e.errno])

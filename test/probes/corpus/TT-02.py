# id: TT-02
# title: TIOCSTI with bits above the 32nd set
# expect: D the filter compares the low half, as the kernel does
# timeout: 10
# escaped: =ok$
# safe: ^sti=(EPERM|EIO)

import pty

slave = pty.openpty()[1]
byte = ctypes.create_string_buffer(b"x")
call("ioctl", slave, 0x5412, byte, label="sti")
call("ioctl", slave, 0x100005412, byte, label="sti with a high bit")
call("ioctl", slave, -0xFFFFABEE, byte, label="sti with every high bit")

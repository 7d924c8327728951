# id: TT-03
# title: paste through TIOCLINUX
# expect: D
# timeout: 10
# escaped: =ok$
# safe: ^linux=(EPERM|ENOTTY|EIO)

import pty

slave = pty.openpty()[1]
call("ioctl", slave, 0x541C, ctypes.create_string_buffer(b"\x03\x00"), label="linux")
call("ioctl", slave, 0x10000541C, ctypes.create_string_buffer(b"\x03\x00"), label="linux with a high bit")

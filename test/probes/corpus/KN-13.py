# id: KN-13
# title: vsock to the host
# expect: D the family is closed
# timeout: 30
# escaped: ^OPEN
# safe: ^family=(EAFNOSUPPORT|EPERM|EACCES)

import socket

try:
    socket.socket(40, socket.SOCK_STREAM).close()
    print("OPEN family")
except OSError as e:
    print("family=" + errno.errorcode[e.errno])
for cid in (0, 1, 2, 3):
    for port in (22, 52, 1024, 5000, 8080, 49983):
        try:
            s = socket.socket(40, socket.SOCK_STREAM)
            s.settimeout(0.3)
            s.connect((cid, port))
            print("OPEN", cid, port)
        except OSError:
            pass

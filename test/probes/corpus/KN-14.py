# id: KN-14
# title: packet and raw sockets
# expect: D
# timeout: 10
# escaped: ^OPEN
# safe: ^done

import socket

for family, kind, protocol in ((17, 3, 768), (17, 2, 768), (2, 3, 1), (2, 3, 255), (10, 3, 58)):
    try:
        socket.socket(family, kind, protocol).close()
        print("OPEN", family, kind, protocol)
    except OSError as e:
        print(family, kind, errno.errorcode[e.errno])
print("done")

# id: KN-15
# title: every socket family
# expect: D only UNIX, INET, INET6 and NETLINK
# timeout: 20
# escaped: ^OPEN (?:0|3|4|5|6|7|8|9|1[1-57-9]|2\d|3\d|4\d) 
# safe: ^OPEN 1 1 

import socket

for family in range(46):
    for kind in (1, 2, 3, 4, 5, 6):
        try:
            socket.socket(family, kind).close()
            print("OPEN", family, kind, "")
        except OSError:
            pass

# id: KN-16
# title: netlink protocols
# expect: D only 0 (route), and nothing can be changed by it
# timeout: 10
# escaped: ^(OPEN [1-9]|CHANGED)
# safe: ^done

import socket

for protocol in range(23):
    try:
        s = socket.socket(16, 3, protocol)
        s.bind((0, 0))
        print("OPEN", protocol)
    except OSError:
        pass
try:
    s = socket.socket(16, 3, 0)
    s.settimeout(2)
    # RTM_NEWLINK (16), request|ack|create|exclusive, an empty link of kind "dummy"
    kind = struct.pack("HH", 9, 1) + b"dummy" + b"\0" * 3
    info = struct.pack("HH", 4 + len(kind), 18) + kind
    body = struct.pack("BxHiII", 0, 0, 0, 0, 0) + info
    s.send(struct.pack("IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
    code = struct.unpack("i", s.recv(4096)[16:20])[0]
    print("newlink=", code)
    if code == 0:
        print("CHANGED")
except OSError as e:
    print(e)
print("done")

# id: NW-28
# title: echo requests, fragments, broadcasts
# expect: D nothing but TCP leaves, and that to what is allowed
# timeout: 20
# needs: internet
# escaped: ^GOT
# safe: ^done

for family, proto, to in ((socket.AF_INET, 1, EVIL), (socket.AF_INET, 1, "allowed.test"), (socket.AF_INET, 1, "169.254.169.254"), (socket.AF_INET6, 58, "2606:4700::1111")):
    try:
        s = socket.socket(family, socket.SOCK_DGRAM, proto)
        s.settimeout(0.5)
        s.sendto(b"\x08\0\0\0\0\1\0\1" + b"data" * 10, (to, 0))
        print("GOT", to, s.recv(99))
    except OSError as e:
        show(to, e)
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
for to in ("255.255.255.255", "10.0.2.255", "224.0.0.251", "239.255.255.250", EVIL):
    for port in (67, 1900, 5353, 9):
        for size in (0, 1, 1472, 20000, 65507):
            try:
                s.sendto(b"x" * size, (to, port))
            except OSError:
                pass
for proto in (132, 136, 33, 262):  # SCTP, UDP-Lite, DCCP, MPTCP
    for kind in (1, 2, 5, 6):
        try:
            with socket.socket(socket.AF_INET, kind, proto) as s:
                s.settimeout(0.3)
                s.connect((EVIL, 80))
                s.send(b"GET / HTTP/1.0\r\n\r\n")
                if kind == 1:
                    outcome(proto, read(s))
        except OSError as e:
            show(proto, kind, e)
print("done")

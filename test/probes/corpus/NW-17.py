# id: NW-17
# title: QUIC, and other datagrams to an allowed host
# expect: D UDP is for rules that name it
# timeout: 20
# needs: internet
# denied: allowed.test proto
# escaped: ^GOT
# safe: ^done

s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(1)
for host in ("allowed.test", EVIL):
    for port in (443, 80, 51820, 123):
        for size in (1200, 9000):  # the second in fragments
            s.sendto(b"\xc0" + b"\0" * (size - 1), (host, port))
try:
    print("GOT", s.recv(99))
except OSError as e:
    show(type(e).__name__)
print("done")

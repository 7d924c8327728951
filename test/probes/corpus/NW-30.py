# id: NW-30
# title: slow and giant requests to who looks into them
# expect: L bounded, and others are answered meanwhile
# timeout: 60
# needs: internet inspection
# passed: l7.allowed.test/v1/meanwhile
# escaped: ^GOT
# safe: ^done

h = "l7.allowed.test"
idle = []
for i in range(100):  # heads that do not end, bodies that do not come
    s = socket.create_connection((h, 80), 2)
    s.sendall(f"GET /v1/a HTTP/1.1\r\nHost: {h}\r\nX: ".encode() if i % 2 else f"POST /v1/slow HTTP/1.1\r\nHost: {h}\r\nContent-Length: 1000000\r\n\r\nx".encode())
    idle.append(s)
big = (
    request(h, "/v1/a", "GET", "X: " + "a" * (1 << 20) + "\r\n"),
    request(h, "/v1/a", "GET", "".join(f"X-{i}: a\r\n" for i in range(100000))),
    request(h, "/v1/" + "a" * (1 << 20)),
    request(h, "/v1/a", "A" * (1 << 20)),
    b"POST /v1/a HTTP/1.1\r\nHost: l7.allowed.test\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * (1 << 20),
    b"POST /v1/a HTTP/1.1\r\nHost: l7.allowed.test\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"".join(b"\0\0\4\3\0" + struct.pack(">I", 2 * i + 1) + b"\0\0\0\x08" for i in range(5000)),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\1\1\0\0\0\0\1\x82" + b"\0\x40\0\x09\0\0\0\0\1" * 1 + b"\0" * (1 << 20),
)
for r in big:
    for send in (tls, lambda h, r: tcp(h, 80, r, 2)):
        # A request whose body is refused may have begun to go on.
        data = send(h, r)
        outcome(len(r), data.replace(b"X-Internet", b"") if r.startswith(b"POST") else data)
outcome("meanwhile", tls(h, request(h, "/v1/meanwhile")).replace(b"X-Internet", b"passed"))
print("done")

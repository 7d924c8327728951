# id: NW-16
# title: hellos without a name, in pieces, too long, of another kind
# expect: D the name is seen after reassembly, or the hello refused
# timeout: 60
# needs: internet
# denied: allowed.test sni_mismatch
# denied: allowed.test proto
# escaped: ^(GOT|HELLO)
# safe: ^done


def hello(name):
    b, o = ssl.MemoryBIO(), ssl.MemoryBIO()
    x = context().wrap_bio(b, o, server_hostname=name)
    try:
        x.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return o.read()


def send(what, *pieces, pause=0.0):
    try:
        with socket.create_connection(("allowed.test", 443), 2) as s:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for p in pieces:
                s.sendall(p)
                time.sleep(pause)
            data = s.recv(7)
    except OSError as e:
        data = type(e).__name__.encode()
    print("HELLO" if data[:1] == b"\x16" else "no", what, data, flush=True)


h = hello("evil.test")
body = h[5:]
record = lambda b: b"\x16\3\1" + struct.pack(">H", len(b)) + b
send("whole", h)
send("byte by byte", *(bytes([b]) for b in h), pause=0.0005)
send("records", *(record(body[i:i + 7]) for i in range(0, len(body), 7)))
send("first byte alone", record(body[:1]) + record(body[1:]))
send("empty records", record(b"") * 5 + h)
send("no name", hello(None))
send("nul", h.replace(b"evil.test", b"evil\0test"))
send("two names", h.replace(b"\x00\x00\x09evil.test", b"\x00\x00\x09evil.test"), hello("allowed.test"))
send("huge", *[record(b"\x01\x03\xff\xff" + b"\0" * 16000)] + [record(b"\0" * 16000)] * 20)
send("ssl2", b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10\x01\x00\x80\x02\x00\x80\x03\x00\x80\x04\x00\x80\x05\x00\x80\x06\x00\x40\x07\x00\xc0" + b"\0" * 16)
send("noise", b"SSH-2.0-x\r\n")
send("alert first", b"\x15\3\1\0\2\1\0" + h)
print("done")

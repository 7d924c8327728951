# id: NW-11
# title: names that two parsers read differently: NUL, dots in labels, pointers, lengths
# expect: D malformed, or another name; none is asked for
# timeout: 40
# needs: internet
# passed: allowed.test/alive
# escaped: ^(GOT|ANSWER)
# safe: ^done

allowed = b"\x07allowed\x04test\0"
for qname in (
    b"\x0aevil.test\0" + allowed, b"\x09evil.test" + allowed, b"\x0dallowed.test\0\0", b"\x0callowed.test\0", b"\x08allowed\0\x04test\0", b"\x07allowed\x05test\0\0",
    b"\x08allowed \x04test\0", b"\x08\tallowed\x04test\0", b"\x08allowed\r\x04test\0", b"\x3f" + b"\xff" * 63 + allowed, b"\x3f" + b"a" * 63 + allowed,
    (b"\x3f" + b"a" * 63) * 4 + allowed, b"\xc0\x0c", b"\x07allowed\xc0\x0c", b"\xc0\xff", b"\x40" + b"a" * 64 + allowed, b"\x80allowed\x04test\0", b"\0", b"",
    b"\x0bevil.test/..\x07allowed\x04test\0", b"\x01*" + allowed, b"\x04evil\x04test\0",
):
    for over in ("udp", "tcp"):
        code, answers = query(qname, over=over, timeout=0.3)
        if answers:
            print("ANSWER", qname)
# Headers that lie about what follows, and messages that are none.
for message in (b"", b"\0", b"\0" * 11, b"\0" * 12, struct.pack(">6H", 1, 0x100, 65535, 65535, 65535, 65535) + allowed, struct.pack(">6H", 1, 0x8180, 1, 0, 0, 0) + allowed + b"\0\1\0\1",
                struct.pack(">6H", 1, 0x2800, 1, 0, 0, 0) + allowed + b"\0\6\0\1", struct.pack(">6H", 1, 0x100, 2, 0, 0, 0) + allowed + b"\0\1\0\1" + b"\x04evil\x04test\0\0\1\0\1", os.urandom(512)):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.sendto(message, ("10.0.2.2", 53))
    tcp("10.0.2.2", 53, struct.pack(">H", len(message) + 7) + message, 0.2)
tcp("allowed.test", 80, request("allowed.test", "/alive"))
print("done")

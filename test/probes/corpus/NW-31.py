# id: NW-31
# title: names, paths and fields that act on terminals and logs
# expect: D what is recorded and told has no control characters
# timeout: 40
# needs: internet
# denied: allowed.test authority_mismatch
# denied: allowed.test sni_mismatch
# escaped: [\x1b\x07\x9b]
# safe: ^done

for name in (b"\x1b]0;owned\x07.evil.test", b"\x1b[2J.evil.test", b"a\r\nb.evil.test", b'x"}\n{"type":"sandbox.exit".evil.test', b"\xc2\x9b31m.evil.test", b"\xe2\x80\xaecod.evil.test", b"\x9b31m.evil.test",
             b"%1b[2J.evil.test", b"\\x1b[2J.evil.test", b"\x00\x01\x02.evil.test", b"<script>.evil.test", b"$(reboot).evil.test", b"-rf.evil.test"):
    query(b"".join(bytes([len(l)]) + l for l in name.split(b".")) + b"\0", timeout=0.2)
    text = name.decode("latin1")
    tcp("allowed.test", 80, request(text), 1)
    tcp("allowed.test", 80, request("allowed.test", "/" + text.replace(" ", "")), 1)
    tcp("allowed.test", 80, f"{text} / HTTP/1.1\r\nHost: {text}\r\n\r\n".encode("latin1"), 1)
    tcp("allowed.test", 80, request("allowed.test", "/a", "GET", f"X: {text}\r\n"), 1)
    tcp("allowed.test", 80, name, 0.3)
b, o = ssl.MemoryBIO(), ssl.MemoryBIO()
x = context().wrap_bio(b, o, server_hostname="esc-title-bel.evil.test")
try:
    x.do_handshake()
except ssl.SSLWantReadError:
    pass
h = o.read()
for evil in (b"\x1b]0;title\x07", b"\r\n\x1b[2Jabcdef", b"\xe2\x80\xaeabcdefghij"):
    tcp("allowed.test", 443, h.replace(b"esc-title-bel", evil[:13].ljust(13, b"x")), 1)
tcp("allowed.test", 80, request("evil.test"))
tls("allowed.test", request("allowed.test"), sni="evil.test")
print("done")

# id: NW-15
# title: another host at the address of an allowed one (domain fronting)
# expect: D where the other name can be seen
# timeout: 40
# needs: internet
# denied: allowed.test sni_mismatch
# denied: allowed.test authority_mismatch
# passed: allowed.test/true
# escaped: ^GOT
# safe: ^done

for other in ("neighbour.test", "other.allowed.test", "evil.test"):  # all served at the address of allowed.test, or allowed themselves
    outcome("hello " + other, tls("allowed.test", request(other), sni=other))
    outcome("host " + other, tcp("allowed.test", 80, request(other)))
    outcome("absolute " + other, tcp("allowed.test", 80, request("allowed.test", f"http://{other}/")))
    outcome("second request " + other, tcp("allowed.test", 80, request("allowed.test", "/true").replace(b"Connection: close\r\n", b"") + request(other, "/second")).partition(b"/true")[2])
outcome("h2", web("http://allowed.test/", "--http2-prior-knowledge", "-H", "Host: neighbour.test"))
print("done")

# id: NW-23
# title: other hosts inside a connection that is looked into
# expect: D refused
# timeout: 40
# needs: internet inspection
# denied: l7.allowed.test authority_mismatch
# passed: l7.allowed.test/v1/true
# escaped: ^GOT
# safe: ^done

h = "l7.allowed.test"
for r in (b"CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n", b"CONNECT l7.allowed.test:443 HTTP/1.1\r\nHost: l7.allowed.test:443\r\n\r\nGET / HTTP/1.1\r\n\r\n",
          request(h, "http://evil.test/v1/a"), request(h, "https://169.254.169.254/v1/a"), request("evil.test", "/v1/a"), request(h + "@evil.test", "/v1/a"), request(h + ":80:90", "/v1/a"),
          request("evil.test\x00." + h, "/v1/a"), request("", "/v1/a"), request(h + ".evil.test", "/v1/a"), request("other.allowed.test", "/v1/a"), request("[::1]", "/v1/a")):
    outcome(r[:40], tls(h, r))
    outcome(r[:40], tcp(h, 80, r, 1))
outcome("other name in the hello", tls(h, request(h, "/v1/a"), sni="other.allowed.test"))
outcome("h2 with another authority", web(f"http://{h}/v1/a", "--http2-prior-knowledge", "-H", "Host: evil.test"))
outcome("h2 elsewhere", web(f"http://{h}/admin", "--http2-prior-knowledge"))
tls(h, request(h, "/v1/true"))
print("done")

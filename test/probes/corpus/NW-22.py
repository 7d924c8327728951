# id: NW-22
# title: requests in requests (smuggling)
# expect: D refused; the server never sees the inner one
# timeout: 60
# needs: internet inspection
# denied: l7.allowed.test framing
# passed: l7.allowed.test/v1/true
# escaped: ^GOT
# safe: ^done

H = "Host: l7.allowed.test\r\n"
inner = f"GET /admin HTTP/1.1\r\n{H}\r\n"
for name, r in {
    "cl.te": f"POST /v1/a HTTP/1.1\r\n{H}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n5c\r\n{inner}\r\n0\r\n\r\n",
    "te.cl": f"POST /v1/a HTTP/1.1\r\n{H}Transfer-Encoding: chunked\r\nContent-Length: {len(inner) + 5}\r\n\r\n0\r\n\r\n{inner}",
    "bare lf": f"GET /v1/a HTTP/1.1\nHost: l7.allowed.test\n\nGET /admin HTTP/1.1\nHost: l7.allowed.test\n\n",
    "xchunked": f"POST /v1/a HTTP/1.1\r\n{H}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n{inner}",
    "chunked twice": f"POST /v1/a HTTP/1.1\r\n{H}Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n{inner}",
    "te tab": f"POST /v1/a HTTP/1.1\r\n{H}Transfer-Encoding:\x0bchunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{inner}",
    "space before colon": f"GET /v1/a HTTP/1.1\r\nHost : l7.allowed.test\r\n\r\n{inner}",
    "folded": f"GET /v1/a HTTP/1.1\r\n{H}X: a\r\n Host: evil.test\r\n\r\n",
    "two lengths": f"POST /v1/a HTTP/1.1\r\n{H}Content-Length: 0\r\nContent-Length: {len(inner)}\r\n\r\n{inner}",
    "length +0": f"POST /v1/a HTTP/1.1\r\n{H}Content-Length: +0\r\n\r\n{inner}",
    "two hosts": f"GET /v1/a HTTP/1.1\r\n{H}Host: evil.test\r\n\r\n",
    "chunk extension": f"POST /v1/a HTTP/1.1\r\n{H}Transfer-Encoding: chunked\r\n\r\n1;\n2\r\nx\r\n0\r\n\r\n{inner}",
    "old and chunked": f"POST /v1/a HTTP/1.0\r\n{H}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{inner}",
    "version": f"GET /v1/a HTTP/1.1 HTTP/1.1\r\n{H}\r\n{inner}",
    "nul": f"GET /v1/a HTTP/1.1\r\n{H}X: a\0b\r\n\r\n{inner}",
    "obs line": f"GET /v1/a\r\n\r\n{inner}",
    "pipelined": f"GET /v1/a HTTP/1.1\r\n{H}\r\n{inner}",
    "upgrade": f"GET /v1/a HTTP/1.1\r\n{H}Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n{inner}",
    "h2c": f"GET /v1/a HTTP/1.1\r\n{H}Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n{inner}",
    "expect": f"POST /v1/a HTTP/1.1\r\n{H}Expect: 100-continue\r\nContent-Length: 0\r\n\r\n{inner}",
}.items():
    for send in (tls, lambda h, r: tcp(h, 80, r, 1)):
        data = send("l7.allowed.test", r.encode("latin1"))
        # The first of two requests may be answered.
        show("GOT" if b"l7.allowed.test /admin" in data else "no", name, data[:40])
tls("l7.allowed.test", request("l7.allowed.test", "/v1/true"))
print("done")

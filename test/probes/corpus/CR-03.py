# id: CR-03
# title: a server that sends back what it got
# expect: V masked in head, body, trailer and pieces
# timeout: 40
# needs: internet credential
# passed: api.bound.test/echo api.bound.test/pieces api.bound.test/gzip
# safe: ^done

field = f"Authorization: Bearer {os.environ['API_TOKEN']}\r\n"
for path in ("/echo", "/pieces", "/gzip", "/base64", "/status", "/trailer", "/error"):
    show(path, tls("api.bound.test", request("api.bound.test", path, "GET", field))[:2000].decode("latin1").encode("unicode_escape").decode())
    show(path, tls("api.bound.test", request("api.bound.test", path))[:2000].decode("latin1").encode("unicode_escape").decode())
for other in ("User-Agent", "Origin", "X-Request-Id", "Referer", "Cookie", "Accept-Language", "Content-Type"):
    show(other, tls("api.bound.test", request("api.bound.test", "/echo", "GET", f"{other}: {os.environ['API_TOKEN']}\r\n"))[:600])
for r in (request("api.bound.test", "/echo", "TRACE"), request("api.bound.test", "/echo", "OPTIONS"), request("api.bound.test", "/echo", "HEAD")):
    show(tls("api.bound.test", r)[:600])
print("done")

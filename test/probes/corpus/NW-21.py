# id: NW-21
# title: methods that are not listed, and fields that stand for them
# expect: D refused; such fields do not go on
# timeout: 60
# needs: internet inspection
# denied: ro.allowed.test method
# passed: ro.allowed.test/v1/true
# escaped: ^GOT
# safe: ^done

host = "ro.allowed.test"
for m in ("POST", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "PROPFIND", "OPTIONS", "get", "GET ", "G\tET", "GETX", "PRI"):
    outcome(m.strip(), tls(host, request(host, "/v1/x", m)))
for field in ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"):
    data = tls(host, request(host, "/v1/override", "GET", f"{field}: DELETE\r\n"))
    if b"DELETE" in data:
        print("GOT", field)
outcome("post", tls(host, request(host, "/v1/x", "POST", "X-HTTP-Method-Override: GET\r\nContent-Length: 0\r\n")))
tls(host, request(host, "/v1/true"))
print("done")

# id: NW-20
# title: paths that servers read in different ways
# expect: D refused, and none reaches the server
# timeout: 60
# needs: internet inspection
# denied: l7.allowed.test path
# passed: l7.allowed.test/v1/true
# escaped: ^GOT
# safe: ^done

for u in ("/v1/../admin", "/v1/%2e%2e/admin", "/v1/..%2fadmin", "/v1/..%5cadmin", "/v1//../admin", "/v1/;/../admin", "/v1/..;/admin", "/v1\\..\\admin", "//admin", "/v1/%252e%252e/admin",
          "/v1/.%00/admin", "/v1/.%2e/admin", "/V1/admin", "/admin", "/v1x/admin", "/%76%31/../admin", "/v1/%c0%ae%c0%ae/admin", "/v1/\xef\xbc\x8e\xef\xbc\x8e/admin", "/v1/..\xef\xbc\x8fadmin", "/v1/\xe2\x80\xa5/admin", "/admin?/v1/", "/admin#/v1/", "*", "admin"):
    for send in (tls, lambda h, r: tcp(h, 80, r)):
        data = send("l7.allowed.test", request("l7.allowed.test", u))
        # A path may be forwarded in the form that was judged, below /v1.
        if not (b"X-Internet" in data and b"l7.allowed.test /v1/" in data and b"admin" not in data.split(b"\r\n\r\n")[-1].replace(b"/v1/%252e%252e/admin", b"")):
            outcome(u.encode("unicode_escape").decode(), data)
outcome("/v1/true", tls("l7.allowed.test", request("l7.allowed.test", "/v1/true")).replace(b"X-Internet", b"passed"))
print("done")

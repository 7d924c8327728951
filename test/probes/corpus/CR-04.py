# id: CR-04
# title: a placeholder in the body
# expect: V to the host of its credential the body goes as it is, without a secret
# timeout: 30
# needs: internet credential
# passed: api.bound.test/echo api.bound.test/clean
# safe: ^done

token = os.environ["API_TOKEN"]
field = f"Authorization: Bearer {token}\r\n"
for body in ('{"model":"%s"}' % token, token, "a" * 70000 + token, f"t={token}&x=1"):
    show("body", token.encode() in tls("api.bound.test", request("api.bound.test", "/echo", "POST", field + f"Content-Length: {len(body)}\r\n") + body.encode()))
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (body[i:i + 7].encode() for i in range(max(0, len(body) - 200), len(body), 7)))
    show("chunks", token.encode() in tls("api.bound.test", request("api.bound.test", "/echo", "POST", field + "Transfer-Encoding: chunked\r\n") + chunks + b"0\r\n\r\n"))
tls("api.bound.test", request("api.bound.test", "/clean", "POST", field + "Content-Length: 2\r\n") + b"{}")
print("done")

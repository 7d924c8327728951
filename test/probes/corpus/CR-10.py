# id: CR-10
# title: no TLS, or servers that do not prove who they are
# expect: D no secret without a verified server
# timeout: 40
# needs: internet credential
# denied: api.bound.test credential_misuse
# escaped: ^GOT
# safe: ^done

field = f"Authorization: Bearer {os.environ['API_TOKEN']}\r\n"
outcome("plain", tcp("api.bound.test", 80, request("api.bound.test", "/echo", "GET", field)))
for name in ("selfsigned", "expired", "wronghost"):
    for f in (field, ""):
        outcome(name, tls(f"{name}.bound.test", request(f"{name}.bound.test", "/echo", "GET", f)))
# Without a placeholder plain HTTP gets nothing, and may pass.
show(tcp("api.bound.test", 80, request("api.bound.test", "/plain"))[-200:])
outcome("plain on 443", tcp("api.bound.test", 443, request("api.bound.test", "/echo", "GET", field)))
print("done")

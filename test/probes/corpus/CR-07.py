# id: CR-07
# title: the placeholder of another sandbox
# expect: D refused, and recorded
# timeout: 30
# where: server
# needs: internet credential
# denied: api.bound.test credential_misuse
# escaped: ^GOT
# safe: ^done

field = f"Authorization: Bearer {os.environ['SIBLING_PLACEHOLDER']}\r\n"
outcome("another's", tls("api.bound.test", request("api.bound.test", "/echo", "GET", field)))
mine = os.environ["API_TOKEN"]
for guess in (mine[:-1] + ("a" if mine[-1] != "a" else "b"), mine + "a"):
    show(guess[:6], tls("api.bound.test", request("api.bound.test", "/guess", "GET", f"Authorization: Bearer {guess}\r\n"))[:200])
print("done")

# id: CR-09
# title: redirects with credentials
# expect: V the broker follows none, and the next hop has no secret
# timeout: 40
# needs: internet credential
# denied: evil.test not_listed
# passed: api.bound.test/to/evil api.bound.test/to/neighbour
# escaped: ^EVIL
# safe: ^done

for to in ("evil", "address", "neighbour", "plain"):
    for more in ((), ("--location-trusted", "-H", f"Authorization: Bearer {os.environ['API_TOKEN']}")):
        data = web(f"https://api.bound.test/to/{to}", "-kL", *more)
        if b"EVIL" in data:
            print("EVIL", to)
        show(to, data[-200:].decode("latin1").encode("unicode_escape").decode())
print("done")

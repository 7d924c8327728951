# id: NW-09
# title: redirects to what is denied
# expect: D the next hop is judged like any other
# timeout: 30
# needs: internet
# denied: 169.254.169.254 metadata
# denied: evil.test not_listed
# denied: 93.184.216.66 not_listed
# passed: redir.allowed.test/to/metadata redir.allowed.test/to/file redir.allowed.test/to/evil redir.allowed.test/to/address
# escaped: ^(CANARY|EVIL)
# safe: ^done

for to in ("metadata", "file", "evil", "address"):
    data = web(f"http://redir.allowed.test/to/{to}", "-L", "--proto-redir", "=http,https,file,gopher,ftp,dict")
    if b"EVIL" in data:
        print("EVIL", to)
    show(to, data[-300:].decode("latin1"))
print("done")

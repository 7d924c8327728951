# id: NW-08
# title: allowed names with addresses that nobody may reach
# expect: D no such address is dialed
# timeout: 40
# needs: internet
# denied: priv-a.allowed.test dns_private_answer
# denied: meta.allowed.test dns_private_answer
# denied: cname.allowed.test dns_private_answer
# denied: mapped.allowed.test dns_private_answer
# denied: nat64.allowed.test dns_private_answer
# denied: host.allowed.test dns_private_answer
# denied: loop.allowed.test dns_private_answer
# denied: zero.allowed.test dns_private_answer
# escaped: ^GOT
# safe: ^done

for n in ("priv-a", "meta", "cname", "mapped", "nat64", "host", "loop", "zero"):
    n += ".allowed.test"
    outcome(n, tcp(n, 80, request(n)))
    outcome(n, tls(n, request(n)))
print("done")

# id: NW-14
# title: an allowed name in the hello to a hard-coded address
# expect: D the address is what is judged
# timeout: 30
# needs: internet
# denied: 93.184.216.66 not_listed
# passed: allowed.test/true
# escaped: ^GOT
# safe: ^done

outcome("resolve", web("https://allowed.test/", "-k", "--resolve", f"allowed.test:443:{EVIL}"))
outcome("connect-to", web("https://allowed.test/", "-k", "--connect-to", "allowed.test:443:evil.test:443"))
outcome("address", web("https://allowed.test/", "-k", "--connect-to", f"::{EVIL}:443"))
outcome("plain", tcp(EVIL, 80, request("allowed.test")))
# The real address of the allowed name: names are allowed, not what they resolve to.
outcome("real address", tls("93.184.216.10", request("allowed.test"), sni="allowed.test"))
tls("allowed.test", request("allowed.test", "/true"))
print("done")

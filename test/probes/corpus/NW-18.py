# id: NW-18
# title: other resolvers, and names by TLS and HTTP
# expect: V port 53 is answered by Berm whatever the address; D all else
# timeout: 40
# needs: internet
# denied: 1.1.1.1 not_listed
# denied: x.evil.test not_listed
# escaped: ^(GOT|ANSWER)
# safe: ^done

for r in ("8.8.8.8", "1.1.1.1", "9.9.9.9", EVIL, "10.0.2.3"):
    for over in ("udp", "tcp"):
        for kind in (1, 16, 28):
            code, answers = query(labels("x.evil.test"), kind, r, over)
            show(r, over, kind, code)
            if answers:
                print("ANSWER", r)
    outcome(r, tls(r, request("dns", "/dns-query?name=evil.test")))
    outcome(r, tls(r, labels("x.evil.test"), port=853))
    outcome(r, tcp(r, 5353))
outcome("doh", web("https://allowed.test/dns-query?name=evil.test", "-k", "--connect-to", "::1.1.1.1:443"))
print("done")

# id: NW-10
# title: names that look like an allowed one
# expect: D only the name itself passes
# timeout: 40
# needs: internet
# denied: evilallowed.test not_listed
# denied: a.b.allowed.test not_listed
# passed: allowed.test/case allowed.test/dot
# escaped: ^(GOT|ANSWER)
# safe: ^done

for h in ("evilallowed.test", "allowed.test.evil.test", "a.b.allowed.test", "allowed.test%00.evil.test", "xn--allowed-9za.test", "allowed。test.evil.test", "ａllowed.evil.test",
          "allowed.test@evil.test", "evil.test#allowed.test", "-allowed.test", "allowed.test..evil.test", "allowed_test", "*.allowed.test", "test", "."):
    for scheme in ("http", "https"):
        outcome(h.encode("unicode_escape").decode(), web(f"{scheme}://{h}/", "-k"))
    for raw in (h.encode(), h.encode("unicode_escape")):
        code, answers = query(labels(raw.decode("latin1")[:200]))
        if answers:
            print("ANSWER", raw)
web("http://ALLOWED.Test/case")
web("http://allowed.test./dot")
print("done")

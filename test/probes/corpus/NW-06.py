# id: NW-06
# title: odd spellings of addresses, as hosts, names and authorities
# expect: D each as the address that it is, or as no name; none is asked for
# timeout: 40
# needs: internet
# denied: 169.254.169.254 metadata
# denied: allowed.test authority_mismatch
# escaped: ^(GOT|ANSWER)
# safe: ^done

spellings = ("2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518", "169.16689662", "127.1", "0", "①⑥⑨.254.169.254", "169.254.169.254.", "0x5db8d842")
for h in spellings:
    outcome(h.encode("unicode_escape").decode(), web(f"http://{h}/"))
    try:
        name = h.encode("idna") if not h.isascii() else h.encode()
    except UnicodeError:
        name = h.encode()
    for raw in {name, h.encode()}:
        code, answers = query(labels(raw.decode("latin1")))
        if answers:
            show("ANSWER", raw)
    for r in (request(h.encode().decode("latin1")), request("allowed.test", f"http://{h}/".encode().decode("latin1"))):
        outcome("authority", tcp("allowed.test", 80, r))
print("done")

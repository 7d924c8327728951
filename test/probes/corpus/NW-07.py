# id: NW-07
# title: a name that changes its address (DNS rebinding)
# users: user
# expect: V only public addresses are dialed, at each connection anew
# timeout: 40
# needs: internet
# denied: n1.rebind.test dns_private_answer
# denied: n3.rebind.test dns_private_answer
# denied: n4.rebind.test dns_private_answer
# passed: n0.rebind.test/
# escaped: ^LOCAL
# safe: ^done

# An answer is used for five seconds, so there are many names. Those that begin with a public
# address change to another one then.
for wait in (0, 0, 5.2):
    time.sleep(wait)
    for i in range(12):
        n = f"n{i}.rebind.test"
        show(n, b"X-Internet" in tcp(n, 80, request(n), 1))
print("done")

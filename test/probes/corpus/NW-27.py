# id: NW-27
# title: other ports of an allowed host
# expect: D only those of the rule
# timeout: 30
# needs: internet
# denied: allowed.test port
# passed: allowed.test/true
# escaped: ^(GOT|OPEN)
# safe: ^done

for q in (1, 22, 25, 465, 587, 853, 2375, 3128, 5432, 6379, 8080, 8443, 65535):
    try:
        socket.create_connection(("allowed.test", q), 1).close()
        print("OPEN", q)
    except OSError as e:
        show(q, type(e).__name__)
outcome("connect", tcp("allowed.test", 80, b"CONNECT allowed.test:22 HTTP/1.1\r\nHost: allowed.test:22\r\n\r\n"))
outcome("port in host", tcp("allowed.test", 80, request("allowed.test:8080")))
tcp("allowed.test", 80, request("allowed.test", "/true"))
print("done")

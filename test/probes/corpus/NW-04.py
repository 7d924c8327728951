# id: NW-04
# title: private and special ranges
# expect: D refused, each with its kind
# timeout: 30
# needs: internet
# denied: 10.0.0.1 private
# denied: 172.16.0.1 private
# denied: 192.168.1.1 private
# denied: 100.64.0.1 private
# denied: 192.0.2.1 reserved
# denied: 93.184.216.66 not_listed
# escaped: ^(GOT|OPEN)
# safe: ^done

for a in ("10.0.0.1", "10.255.255.254", "172.16.0.1", "192.168.1.1", "100.64.0.1", "127.0.0.2", "0.0.0.0", "0.1.2.3", "198.18.0.1", "198.19.255.254", "192.0.2.1", "203.0.113.66",
          "224.0.0.1", "240.0.0.1", "255.255.255.255", EVIL):
    try:
        socket.create_connection((a, 80), 1).close()
        show("OPEN", a)
    except OSError as e:
        show(a, type(e).__name__)
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    for port in (53, 123, 1900, 5353):
        try:
            s.sendto(b"x" * 50, (a, port))
        except OSError:
            pass
print("done")

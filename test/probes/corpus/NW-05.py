# id: NW-05
# title: IPv4 addresses in the disguise of IPv6
# expect: D each as the address that it is
# timeout: 30
# needs: internet
# denied: 169.254.169.254 metadata
# denied: 93.184.216.66 not_listed
# escaped: ^(GOT|OPEN)
# safe: ^done

for a in ("::ffff:169.254.169.254", f"::ffff:{EVIL}", "::169.254.169.254", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe", "2002:a9fe:a9fe::1", "2001:0:a9fe:a9fe::",
          "::ffff:0:a9fe:a9fe", "fec0::1", "fe80::1%eth0", "::1%lo", "::", "2606:4700::1111"):
    outcome(a, web(f"http://[{a.replace('%', '%25')}]/"))
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        s = socket.socket(socket.AF_INET6, kind)
        s.settimeout(1)
        try:
            host, _, zone = a.partition("%")
            s.connect((host, 80, 0, socket.if_nametoindex(zone) if zone else 0))
            s.send(b"GET / HTTP/1.0\r\n\r\n")
            if kind == socket.SOCK_STREAM:
                show("OPEN", a)
        except OSError:
            pass
        s.close()
print("done")

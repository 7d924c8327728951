# id: NW-01
# title: metadata services of clouds, by address
# expect: D refused inside, recorded as metadata, whatever a rule says
# timeout: 30
# needs: internet
# denied: 169.254.169.254 metadata
# denied: 169.254.170.2 metadata
# denied: 169.254.170.23 metadata
# denied: 169.254.169.253 metadata
# denied: 169.254.0.23 metadata
# denied: 100.100.100.200 metadata
# denied: 168.63.129.16 metadata
# denied: 192.0.0.192 metadata
# escaped: ^GOT
# safe: ^done

for a in ("169.254.169.254", "169.254.170.2", "169.254.170.23", "169.254.169.253", "169.254.0.23", "100.100.100.200", "168.63.129.16", "192.0.0.192"):
    for port in (80, 443, 1338):
        outcome(f"{a}:{port}", tcp(a, port, request(a, "/latest/meta-data/")))
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for a in ("169.254.169.123", "169.254.169.254"):
    s.sendto(b"\x1b" + b"\0" * 47, (a, 123))
print("done")

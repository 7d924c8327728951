# id: NW-03
# title: services of the host, by each of its addresses
# expect: D none answers
# timeout: 40
# needs: internet
# denied: 10.77.0.1 host
# denied: 172.17.0.1 private
# denied: host.docker.internal not_listed
# escaped: ^(GOT|OPEN)
# safe: ^done

ports = [22, 80, 2375, 6443, 8000, 8080, int(os.environ["HOST_PORT"]), int(os.environ.get("API_PORT", "7676"))]
for a in ("10.0.2.2", "10.0.2.3", "10.77.0.1", "10.77.0.2", "172.17.0.1", "192.168.127.254", "host.docker.internal", "host.containers.internal", "localhost.", "127.0.0.1"):
    for port in ports:
        try:
            socket.create_connection((a, port), 1).close()
            show("OPEN", a, port)
        except OSError as e:
            pass
for port in ports:
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.sendto(b"x", ("10.77.0.1", port))
print("done")

# id: NW-13
# title: a relay inside the sandbox
# expect: D as without it
# timeout: 30
# needs: internet
# denied: 93.184.216.66 not_listed
# passed: allowed.test/relayed
# escaped: ^GOT
# safe: ^done

import threading


def relay(port, to):
    l = socket.create_server(("127.0.0.1", port))

    def go():
        while True:
            c, _ = l.accept()
            try:
                o = socket.create_connection(to, 2)
                threading.Thread(target=copy, args=(o, c), daemon=True).start()
                threading.Thread(target=copy, args=(c, o), daemon=True).start()
            except OSError:
                c.close()

    threading.Thread(target=go, daemon=True).start()


def copy(a, b):
    try:
        while data := a.recv(4096):
            b.sendall(data)
        b.shutdown(1)
    except OSError:
        pass


relay(9991, ("127.0.0.1", 9992))
relay(9992, (EVIL, 80))
relay(9993, ("allowed.test", 80))
outcome("evil", tcp("127.0.0.1", 9991, request("evil.test")))
outcome("another host of the relay", tcp("127.0.0.1", 9993, request("evil.test")))
tcp("127.0.0.1", 9993, request("allowed.test", "/relayed"))
print("done")

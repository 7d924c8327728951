# id: IL-10
# title: ports that can be foretold
# expect: V own stack: a listener of the host cannot be reached or collided with
# timeout: 20
# escaped: ^(CONNECTED|TAKEN)
# safe: ^done

import socket

port = int(os.environ["HOST_PORT"])
for address in ("127.0.0.1", "0.0.0.0", "::1", "localhost"):
    try:
        socket.create_connection((address, port), 1).close()
        print("CONNECTED", address)
    except OSError:
        pass
s = socket.socket(socket.AF_UNIX)
try:
    s.connect("\0canary-" + str(port))
    print("CONNECTED abstract")
except OSError:
    pass
try:
    s = socket.socket()
    s.bind(("127.0.0.1", port))
except OSError as e:
    print("TAKEN", e)
print("done")

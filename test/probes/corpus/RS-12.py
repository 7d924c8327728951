# id: RS-12
# title: memory of pipes and sockets
# expect: L counted as the sandbox's memory, or bounded for each user
# timeout: 12
# limit: memory
# abuse: yes

import fcntl
import socket
import time

held = []
try:
    while len(held) < 100_000:
        r, w = os.pipe()
        held.append((r, w))
        try:
            fcntl.fcntl(w, 1031, 1 << 20)  # F_SETPIPE_SZ
        except OSError:
            pass
        os.set_blocking(w, False)
        try:
            os.write(w, b"x" * (1 << 20))
        except OSError:
            pass
        a, b = socket.socketpair()
        held.append((a, b))
        a.setblocking(False)
        try:
            a.send(b"x" * (1 << 20))
        except OSError:
            pass
except OSError as e:
    print(errno.errorcode[e.errno], len(held), flush=True)
time.sleep(60)

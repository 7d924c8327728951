# id: LO-03
# title: sockets of agents, of services and of the desktop
# expect: D none can be called
# timeout: 20
# where: local
# escaped: ^CALLED
# safe: ^done

import socket

for path in os.environ["HOST_SOCKETS"].split(":") + [os.environ.get("SSH_AUTH_SOCK", ""), "/tmp/.X11-unix/X0"]:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        for way in (path, "/proc/self/root" + path, "/proc/1/root" + path):
            if len(way) > 107:
                continue
            try:
                socket.socket(socket.AF_UNIX, kind).connect(way)
                print("CALLED", way)
            except OSError:
                pass
print("done")

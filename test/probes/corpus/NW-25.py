# id: NW-25
# title: a source address, a route or a frame of one's own
# expect: D no rights for it, and the stack drops it
# timeout: 20
# needs: internet
# escaped: ^(SENT|SET)
# safe: ^done

import fcntl

for family, kind, proto in ((2, 3, 255), (2, 3, 1), (10, 3, 58), (17, 3, 0x300), (17, 2, 0x300), (2, 10, 0)):
    try:
        s = socket.socket(family, kind, proto)
        s.sendto(bytes.fromhex("4500001c000100004011000001020304") + socket.inet_aton(EVIL) + b"\0\x35\0\x35\0\x08\0\0", (EVIL, 0))
        print("SENT", family, kind)
    except OSError as e:
        show(family, kind, e)
for option in (19, 15):  # IP_TRANSPARENT, IP_FREEBIND
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        s.setsockopt(socket.IPPROTO_IP, option, 1)
        s.bind(("1.2.3.4", 53))
        s.sendto(b"x", ("10.0.2.2", 53))
        s.sendto(b"x", (EVIL, 53))
        print("bound as another, which the stack must drop")
    except OSError as e:
        show(option, e)
s = socket.socket()
for name, nr in (("SIOCSIFADDR", 0x8916), ("SIOCADDRT", 0x890B), ("SIOCSIFFLAGS", 0x8914), ("SIOCSIFMTU", 0x8922)):
    try:
        fcntl.ioctl(s, nr, b"eth0".ljust(16, b"\0") + struct.pack("HH4s", 2, 0, socket.inet_aton("1.2.3.4")).ljust(40, b"\0"))
        print("SET", name)
    except OSError as e:
        show(name, e)
try:
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, 0x400454CA, b"eth0".ljust(16, b"\0") + struct.pack("H", 0x1001).ljust(24, b"\0"))
    print("SET tun")
except OSError as e:
    show("tun", e)
print("done")

# id: NW-29
# title: floods of flows, names and denials
# expect: L bounded, and the network goes on
# timeout: 60
# needs: internet
# denied: 93.184.216.66 not_listed
# passed: allowed.test/after
# escaped: ^GOT
# safe: ^done

import select

open_, failed = [], 0
for i in range(3000):
    try:
        s = socket.socket()
        s.setblocking(False)
        s.connect_ex(("198.18.0.1" if i % 2 else EVIL, 80 + i % 3))
        open_.append(s)
    except OSError:
        failed += 1
        if open_:
            open_.pop(0).close()
show(len(open_), failed)
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for i in range(5000):
    try:
        u.sendto(struct.pack(">6H", i, 0x100, 1, 0, 0, 0) + labels(f"n{i}.evil.test") + b"\0\1\0\1", ("10.0.2.2", 53))
        if i % 4 == 0:
            u.sendto(b"x", (EVIL, 1024 + i))
    except OSError:
        pass
for s in open_:
    s.close()
for _ in range(20):
    data = tcp("allowed.test", 80, request("allowed.test", "/after"), 2)
    if b"X-Internet" in data:
        break
    time.sleep(0.5)
print("done")

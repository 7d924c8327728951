# id: NW-24
# title: other sandboxes, and scans
# expect: D there is no network that sandboxes share
# timeout: 40
# needs: internet
# escaped: ^OPEN
# safe: ^done

import select

port = int(os.environ["SIBLING_PORT"])
waiting = {}
for net, hosts in (("10.0.2.", range(1, 255)), ("10.0.3.", range(1, 20)), ("198.18.0.", range(0, 40))):
    for i in hosts:
        if net + str(i) == "10.0.2.15":
            continue
        s = socket.socket()
        s.setblocking(False)
        s.connect_ex((net + str(i), port))
        waiting[s] = net + str(i)
end = time.time() + 2
while waiting and time.time() < end:
    _, ready, _ = select.select([], list(waiting), [], 0.2)
    for s in ready:
        if s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            show("OPEN", waiting[s])
        del waiting[s]
print(open("/proc/net/arp").read())
print("done")

# id: PS-02
# title: fork storm against the killer
# expect: L the kill wins; the group is empty and removed
# timeout: 4
# abuse: yes

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("started", flush=True)
for _ in range(8):
    if os.fork() == 0:
        break
while True:
    try:
        if os.fork():
            os._exit(0)
        os.setsid()
    except OSError:
        pass

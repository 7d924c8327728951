# id: LO-04
# title: processes of the same user outside
# expect: D not there: neither to see, nor to signal, trace or wait for
# timeout: 20
# where: local
# escaped: ^(SAW|SENT|TRACED)
# safe: ^done

import signal

pid = int(os.environ["HOST_PID"])
mine = {os.getpid(), os.getppid()} | set(map(int, os.listdir("/proc/1/task")))  # init has threads
buffer = ctypes.create_string_buffer(8)
for other in [pid] + list(range(2, 400)):
    if other in mine:
        continue
    try:
        with open(f"/proc/{other}/environ", "rb") as file:
            print("SAW", other, file.read())
    except OSError:
        pass
    try:
        os.kill(other, 0)
        print("SENT", other)
    except OSError:
        pass
    if raw(number("ptrace"), 0x4206, other, 0, 0)[0] != -1:
        print("TRACED", other)
    if raw(number("pidfd_open"), other, 0)[0] >= 0:
        print("SAW", other, "pidfd")
    vector = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(buffer), 8))
    if raw(number("process_vm_readv"), other, vector, 1, vector, 1, 0)[0] > 0:
        print("TRACED", other, "memory")
for to in (-1, -pid):  # -1 spares the caller and init
    try:
        os.kill(to, signal.SIGTERM)
    except OSError as e:
        print("kill", to, errno.errorcode[e.errno])
print("done")

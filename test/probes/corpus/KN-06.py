# id: KN-06
# title: ptrace and process memory of what is not ours
# expect: V only own children can be traced
# timeout: 20
# escaped: ^TRACED
# safe: ^done

PTRACE_ATTACH, PTRACE_SEIZE, PTRACE_DETACH = 16, 0x4206, 17
mine = {os.getpid(), os.getppid()}
buffer = ctypes.create_string_buffer(8)
for name in os.listdir("/proc"):
    if not name.isdigit() or int(name) in mine:
        continue
    pid = int(name)
    try:
        command = open(f"/proc/{pid}/comm").read().strip()
    except OSError:
        continue
    if pid != 1 and "berm" not in command:
        continue
    if raw(number("ptrace"), PTRACE_SEIZE, pid, 0, 0)[0] != -1:
        print("TRACED", pid, command)
    vector = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(buffer), 8))
    remote = ctypes.create_string_buffer(struct.pack("QQ", 0x400000, 8))
    if raw(number("process_vm_readv"), pid, vector, 1, remote, 1, 0)[0] > 0:
        print("TRACED", pid, "memory")
print("done")

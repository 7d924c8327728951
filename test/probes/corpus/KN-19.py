# id: KN-19
# title: take the filter over
# expect: D no listener; the mode stays 2
# timeout: 10
# escaped: ^(seccomp\(listener\)=(ok|EFAULT|EINVAL)|MODE)
# safe: ^mode=2

# NEW_LISTENER with a filter that is valid: one instruction, "allow".
program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
fprog = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(program)))
_libc.prctl(38, 1, 0, 0, 0)  # no_new_privs, so that only the filter can refuse
call("seccomp", 1, 8, fprog, label="seccomp(listener)")
for line in open("/proc/self/status"):
    if line.startswith("Seccomp:"):
        print("mode=" + line.split()[1])
        if line.split()[1] != "2":
            print("MODE")

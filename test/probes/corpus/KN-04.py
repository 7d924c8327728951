# id: KN-04
# title: bpf, perf, userfaultfd, fanotify
# expect: D
# timeout: 10
# escaped: =(ok|EFAULT|EINVAL|E2BIG|ENOENT)$
# safe: ^bpf=(EPERM|ENOSYS)

attribute = ctypes.create_string_buffer(struct.pack("IIII", 1, 4, 4, 1), 128)  # a small hash map
call("bpf", 0, attribute, 128)
event = ctypes.create_string_buffer(struct.pack("IIQ", 1, 128, 0), 128)  # software clock
call("perf_event_open", event, 0, -1, -1, 0)
call("userfaultfd", 1)
call("fanotify_init", 0, 0)

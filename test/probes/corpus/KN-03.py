# id: KN-03
# title: io_uring
# expect: D ENOSYS or EPERM
# timeout: 10
# escaped: ^io_uring_setup=(ok|EFAULT|EINVAL)
# safe: ^io_uring_setup=(ENOSYS|EPERM)

params = ctypes.create_string_buffer(256)
call("io_uring_setup", 8, params)

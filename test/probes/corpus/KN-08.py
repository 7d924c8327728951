# id: KN-08
# title: every privileged call once, with arguments that do nothing
# expect: D each one
# timeout: 10
# escaped: =ok$
# safe: ^kexec_load=(EPERM|ENOSYS)

for name in (
    "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "create_module", "swapon", "swapoff",
    "acct", "quotactl", "quotactl_fd", "nfsservctl", "iopl", "ioperm", "pivot_root", "chroot", "mount", "umount2", "setns",
    "lookup_dcookie", "vhangup", "kcmp",
):
    call(name, 0, 0, 0, 0, 0)
call("reboot", 0xFEE1DEAD, 672274793, 0)  # "disable Ctrl-Alt-Del": harmless
call("settimeofday", 0, ctypes.create_string_buffer(8))
call("clock_settime", 0, ctypes.create_string_buffer(struct.pack("qq", -1, 0)))
call("sethostname", ctypes.c_char_p(b"probe"), 5)
call("setdomainname", ctypes.c_char_p(b"probe"), 5)
call("syslog", 3, ctypes.create_string_buffer(64), 64)

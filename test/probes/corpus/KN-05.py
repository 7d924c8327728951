# id: KN-05
# title: keyrings, which have no namespace
# expect: D EPERM or ENOSYS; /proc/keys shows nothing
# timeout: 10
# escaped: (=(ok|EINVAL|ENOKEY|EFAULT)$|^READ)
# safe: ^keyctl\(session\)=(EPERM|ENOSYS)

for name, ring in (("thread", -1), ("process", -2), ("session", -3), ("user", -4), ("user session", -5)):
    call("keyctl", 0, ring, 1, label=f"keyctl({name})")
call("add_key", ctypes.c_char_p(b"user"), ctypes.c_char_p(b"probe"), ctypes.c_char_p(b"x"), 1, -3)
call("request_key", ctypes.c_char_p(b"user"), ctypes.c_char_p(b"probe"), 0, -3)
for path in ("/proc/keys", "/proc/key-users"):
    try:
        text = open(path).read()
    except OSError:
        continue
    if text:
        print("READ", path, text[:80])

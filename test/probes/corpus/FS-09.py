# id: FS-09
# title: chroot twice and climb
# expect: D EPERM
# timeout: 10
# escaped: ^(CHROOT|READ)
# safe: ^chroot=EPERM

os.makedirs("/tmp/inner", exist_ok=True)
here = os.open("/", os.O_RDONLY)
if call("chroot", ctypes.c_char_p(b"/tmp/inner")) == 0:
    print("CHROOT")
    os.fchdir(here)
    for _ in range(64):
        os.chdir("..")
    os.chroot(".")
    try:
        print("READ", open(os.environ["HOST_CANARY"]).read())
    except OSError as e:
        print(e)

# id: KN-17
# title: system calls of the 32-bit and x32 ABIs
# expect: D a signal or ENOSYS
# timeout: 10
# escaped: ^(i386|x32)=-?\d+ ok
# safe: ^done

import mmap
import signal

if _amd64:
    # mov eax, 20 (getpid of i386); int 0x80; ret
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    for name, act in (
        ("i386", lambda: ctypes.CFUNCTYPE(ctypes.c_int)(address)()),
        ("x32", lambda: raw(0x40000000 + 39)[0]),
    ):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            result = act()
            print(f"{name}={result} " + ("ok" if result > 0 else "refused"), flush=True)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            print(f"{name}={signal.Signals(os.WTERMSIG(status)).name}")
print("done")

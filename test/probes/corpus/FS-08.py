# id: FS-08
# title: the newer mount calls
# expect: D EPERM or ENOSYS, also with arguments that would work
# timeout: 10
# escaped: =(ok|EFAULT|EINVAL|EBADF|ENOENT)$
# safe: ^open_tree=(EPERM|ENOSYS)$

call("open_tree", -100, ctypes.c_char_p(b"/"), 1)  # OPEN_TREE_CLONE
call("fsopen", ctypes.c_char_p(b"tmpfs"), 0)
call("fspick", -100, ctypes.c_char_p(b"/"), 0)
call("fsconfig", -1, 0, 0, 0, 0)
call("fsmount", -1, 0, 0)
call("move_mount", -1, ctypes.c_char_p(b""), -1, ctypes.c_char_p(b""), 0)
call("mount_setattr", -1, ctypes.c_char_p(b""), 0, 0, 0)
call("open_tree_attr", -100, ctypes.c_char_p(b"/"), 1, 0, 0)
call("mount", ctypes.c_char_p(b"t"), ctypes.c_char_p(b"/tmp"), ctypes.c_char_p(b"tmpfs"), 0, 0)
call("umount2", ctypes.c_char_p(b"/proc/sys"), 2)
call("pivot_root", ctypes.c_char_p(b"/"), ctypes.c_char_p(b"/"))

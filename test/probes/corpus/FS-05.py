# id: FS-05
# title: open files by handle, past every path check
# expect: D EPERM: needs CAP_DAC_READ_SEARCH in the first user namespace
# timeout: 10
# escaped: ^open_by_handle_at\S*=ok
# safe: ^open_by_handle_at\S*=(EPERM|ENOSYS|ESTALE|EINVAL)

root = os.open("/", os.O_RDONLY)
for inode in (1, 2, 128):
    # struct file_handle: bytes, type 1 (inode and generation), the inode.
    handle = ctypes.create_string_buffer(struct.pack("IiQ", 8, 1, inode))
    call("open_by_handle_at", root, handle, 0, label=f"open_by_handle_at({inode})")

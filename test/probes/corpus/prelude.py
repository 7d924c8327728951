"""Put before every probe of kind py: raw system calls that print their outcome."""

import ctypes
import errno
import os
import platform
import struct
import sys

_libc = ctypes.CDLL(None, use_errno=True)
_amd64 = platform.machine() == "x86_64"

# name: (number on amd64, number on arm64); None: the machine has no such call.
_numbers = {
    "acct": (163, 89), "add_key": (248, 217), "bpf": (321, 280), "clone3": (435, 435), "close_range": (436, 436),
    "create_module": (174, None), "delete_module": (176, 106), "fanotify_init": (300, 262), "finit_module": (313, 273),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433), "init_module": (175, 105),
    "io_uring_setup": (425, 425), "ioctl": (16, 29), "ioperm": (173, None), "iopl": (172, None), "kcmp": (312, 272),
    "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219), "lookup_dcookie": (212, 18),
    "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429), "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42), "open_by_handle_at": (304, 265), "open_tree": (428, 428), "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241), "pidfd_getfd": (438, 438), "pidfd_open": (434, 434), "pivot_root": (155, 41),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "reboot": (169, 142), "request_key": (249, 218), "seccomp": (317, 277),
    "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116), "umount2": (166, 39),
    "unshare": (272, 97), "userfaultfd": (323, 282), "vhangup": (153, 58), "mknodat": (259, 33), "chroot": (161, 51),
    "memfd_secret": (447, 447), "statmount": (457, 457), "listmount": (458, 458), "clone": (56, 220),
}


def number(name):
    return _numbers[name][0 if _amd64 else 1]


def raw(nr, *args):
    """Makes system call nr; returns (result, errno name or "ok")."""
    values = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    ctypes.set_errno(0)
    result = _libc.syscall(ctypes.c_long(nr), *values)
    code = ctypes.get_errno()
    return result, "ok" if result != -1 else errno.errorcode.get(code, str(code))


def call(name, *args, label=None):
    """Makes a system call by name and prints "label=outcome"."""
    nr = number(name)
    if nr is None:
        print(f"{label or name}=ENOSYS", flush=True)
        return -1
    result, outcome = raw(nr, *args)
    print(f"{label or name}={outcome}", flush=True)
    return result

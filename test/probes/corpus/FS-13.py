# id: FS-13
# title: capabilities of files and processes
# expect: D none of the dangerous ones, in any set
# timeout: 20
# escaped: ^(HAS|GAINED)
# safe: ^bounding=

import subprocess

dangerous = {
    1: "DAC_READ_SEARCH?", 12: "NET_ADMIN", 13: "NET_RAW", 16: "SYS_MODULE", 17: "SYS_RAWIO", 18: "SYS_CHROOT",
    19: "SYS_PTRACE", 20: "SYS_PACCT", 21: "SYS_ADMIN", 22: "SYS_BOOT", 23: "SYS_NICE", 24: "SYS_RESOURCE",
    25: "SYS_TIME", 27: "MKNOD", 30: "AUDIT_CONTROL", 31: "SETFCAP", 32: "MAC_OVERRIDE", 33: "MAC_ADMIN",
    34: "SYSLOG", 36: "BLOCK_SUSPEND", 37: "AUDIT_READ", 38: "PERFMON", 39: "BPF", 40: "CHECKPOINT_RESTORE",
}
dangerous[2] = "DAC_READ_SEARCH"
del dangerous[1]  # DAC_OVERRIDE is what a package manager needs, over files of this sandbox
for line in open("/proc/self/status"):
    if line.startswith("Cap"):
        name, value = line.split()
        bits = int(value, 16)
        for bit, capability in dangerous.items():
            if bits >> bit & 1:
                print("HAS", name, capability)
        if name == "CapBnd:":
            print("bounding=", hex(bits))
try:
    # A version 2 file capability: effective, CAP_SYS_ADMIN permitted.
    with open("/tmp/cap", "wb") as file:
        file.write(open("/bin/cat", "rb").read())
    os.chmod("/tmp/cap", 0o755)
    os.setxattr("/tmp/cap", "security.capability", struct.pack("<IIIII", 0x02000001, 1 << 21, 0, 0, 0))
    status = subprocess.run(["/tmp/cap", "/proc/self/status"], capture_output=True, text=True).stdout
    for line in status.splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> 21 & 1:
            print("GAINED", line)
except OSError as e:
    print("setxattr:", e)

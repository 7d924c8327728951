# id: FS-16
# title: make read-only mounts writable
# expect: D no mount of this sandbox changes from ro to rw
# timeout: 20
# escaped: ^REMOUNTED
# safe: ^readonly=

count = 0
for line in open("/proc/self/mountinfo"):
    fields = line.split()
    if "ro" not in fields[5].split(","):
        continue
    count += 1
    MS_REMOUNT, MS_BIND = 32, 4096
    for flags in (MS_REMOUNT, MS_REMOUNT | MS_BIND):
        if raw(number("mount"), 0, ctypes.c_char_p(fields[4].encode()), 0, flags, 0)[0] == 0:
            print("REMOUNTED", fields[4])
print("readonly=", count)

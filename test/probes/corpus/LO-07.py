# id: LO-07
# title: attributes that tell an overlay where its files lie
# expect: D overlayfs keeps them for itself: nothing else appears in the workspace
# timeout: 20
# where: local
# escaped: ^(READ|SEEN)
# safe: ^done

os.makedirs("layer", exist_ok=True)
with open("layer/file", "w") as file:
    file.write("own")
canary = os.environ["HOST_CANARY"]
for prefix in ("user.overlay.", "trusted.overlay.", "user.overlay.overlay."):
    for name, value in (("redirect", os.path.dirname(canary)), ("opaque", "y"), ("metacopy", ""), ("origin", "x"), ("whiteout", ""), ("nlink", "U+5")):
        for path in ("layer", "layer/file", "src", "."):
            try:
                os.setxattr(path, prefix + name, value.encode())
            except OSError:
                continue
            try:
                for entry in os.listdir(path):
                    if "canary" in entry:
                        print("SEEN", path, entry)
            except OSError:
                pass
            for entry in (path + "/" + os.path.basename(canary), path):
                try:
                    text = open(entry).read()
                    if "CANARY" in text:
                        print("READ", entry, text)
                except OSError:
                    pass
for name in ("upper", "work", "w", "s", "r", "../s/upper", "../w"):
    if os.path.lexists(name):
        print("SEEN", name)
print("done")

# id: LO-02
# title: secrets in home and other projects, by name, by link and by mount
# expect: D none is there
# timeout: 20
# where: local
# escaped: ^(READ|LINKED|LISTED)
# safe: ^done

def read(path):
    try:
        with open(path) as file:
            print("READ", path, file.read())
    except OSError:
        pass


for n, path in enumerate(os.environ["HOST_SECRETS"].split(":")):
    read(path)
    read("/proc/self/root" + path)
    os.symlink(path, f"soft{n}")
    read(f"soft{n}")
    for source in (path, f"soft{n}"):
        if _libc.linkat(-100, source.encode(), -100, f"hard{n}".encode(), 0x400) == 0:  # follows links
            print("LINKED", source)
            read(f"hard{n}")
    if os.path.lexists(path):
        print("LISTED", path)
here = os.path.basename(os.getcwd())
beside = [name for name in os.listdir("..") if name != here]
if beside:
    print("LISTED beside the project", beside)
print("done")

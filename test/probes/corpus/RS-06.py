# id: RS-06
# title: use up the inodes
# expect: L an inode limit, or the memory limit
# timeout: 40
# where: server
# abuse: yes
# users: root

os.makedirs("inodes", exist_ok=True)
count = 0
try:
    while count < 2_000_000:
        os.close(os.open(f"inodes/{count}", os.O_CREAT | os.O_WRONLY))
        count += 1
except OSError as e:
    print(errno.errorcode[e.errno])
print("inodes", count, flush=True)

# id: RS-07
# title: use up descriptors
# expect: L EMFILE in each process; the host has some left
# timeout: 10
# abuse: yes
# safe: ^EMFILE

for _ in range(8):
    if os.fork() == 0:
        count = 0
        try:
            while count < 5_000_000:
                os.dup(0)
                count += 1
        except OSError as e:
            print(errno.errorcode[e.errno], count, flush=True)
        import time
        time.sleep(60)
import time
time.sleep(60)

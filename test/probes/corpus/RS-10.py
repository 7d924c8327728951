# id: RS-10
# title: flood of zombies and orphans
# expect: L init reaps orphans; zombies count as pids
# timeout: 8
# abuse: yes

for _ in range(100_000):
    try:
        if os.fork() == 0:
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
    except OSError:
        pass

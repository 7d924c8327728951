# id: RS-02
# title: thread bomb
# expect: L the pids limit
# timeout: 6
# abuse: yes

import threading
import time

while True:
    try:
        threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
    except RuntimeError:
        time.sleep(0.1)

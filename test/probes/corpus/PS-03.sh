# id: PS-03
# title: stopped and traced processes
# expect: L killed like the others
# timeout: 5
# abuse: yes
# safe: ^started

sleep 999 &
kill -STOP $!
python3 -c 'import ctypes, os, signal
if os.fork() == 0:
    ctypes.CDLL(None).ptrace(0, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGSTOP)' &
sleep 0.5
echo started

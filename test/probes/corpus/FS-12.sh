# id: FS-12
# title: gain rights through set-uid programs
# expect: V root inside is an unprivileged id outside; no right of the host is gained
# timeout: 20
# escaped: ^READ
# safe: ^done

cp /bin/sh /tmp/suid && chmod 4755 /tmp/suid && /tmp/suid -p -c id
sudo -n id 2>&1
sudo -n cat /proc/self/uid_map 2>&1
sudo -n cat "$HOST_CANARY_SECRET" 2>/dev/null && echo READ
sudo -n sh -c 'echo 1 >/proc/sys/kernel/printk' 2>&1
newuidmap $$ 0 0 1 2>&1
grep NoNewPrivs /proc/self/status
echo done

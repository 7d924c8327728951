# id: PS-06
# title: plant something to run later
# expect: V it lies in this sandbox only and goes with it
# timeout: 10
# safe: ^done
# next: test ! -e /etc/cron.d/probe && ! grep -qs probe ~/.bashrc && echo CLEAN

sudo -n true 2>/dev/null && as="sudo -n" || as=
$as sh -c 'mkdir -p /etc/cron.d; echo "* * * * * root touch /tmp/cron" >/etc/cron.d/probe' 2>&1
(crontab -l 2>/dev/null; echo '* * * * * touch /tmp/cron') | crontab - 2>&1
echo 'touch /tmp/probe' >>~/.bashrc
echo 'touch /tmp/at' | at now + 1 minute 2>&1
echo done

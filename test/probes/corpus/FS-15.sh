# id: FS-15
# title: change the base image
# expect: V the change stays in this sandbox; the next one is clean
# timeout: 10
# safe: ^done
# next: test ! -e /etc/berm-probe && ! grep -q probe-was-here /usr/bin/env /etc/passwd && echo CLEAN

sudo -n true 2>/dev/null && as="sudo -n" || as=
$as sh -c 'echo probe-was-here >>/usr/bin/env; echo probe >/etc/berm-probe; echo "# probe-was-here" >>/etc/passwd' 2>&1
echo done

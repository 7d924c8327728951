# id: KN-01
# title: user namespaces
# expect: D EPERM
# timeout: 10
# escaped: ^GOT
# safe: ^done

unshare -Ur true 2>&1 && echo "GOT user"
unshare -Urmnp true 2>&1 && echo "GOT user, mount, net, pid"
sudo -n unshare -m true 2>&1 && echo "GOT mount"
echo done

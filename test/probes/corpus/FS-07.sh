# id: FS-07
# title: mount a second proc, bind the root, remount
# expect: D EPERM
# timeout: 20
# escaped: ^MOUNTED
# safe: ^done

mkdir -p /tmp/mnt
mount -t proc proc /tmp/mnt 2>&1 && echo "MOUNTED proc"
mount -t sysfs sys /tmp/mnt 2>&1 && echo "MOUNTED sysfs"
mount -t tmpfs tmp /tmp/mnt 2>&1 && echo "MOUNTED tmpfs"
mount --bind / /tmp/mnt 2>&1 && echo "MOUNTED bind"
mount -o remount,rw /proc/sys 2>&1 && echo "MOUNTED remount"
umount -l /proc/sys 2>&1 && echo "MOUNTED umount"
echo done

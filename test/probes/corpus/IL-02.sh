# id: IL-02
# title: identity of the machine
# expect: V own values; hardware names hidden
# timeout: 10
# escaped: ^DMI
# safe: ^done
# host-value: /etc/machine-id /proc/sys/kernel/random/boot_id /sys/class/dmi/id/product_uuid /sys/class/dmi/id/board_vendor /etc/hostname

hostname
cat /etc/machine-id /proc/sys/kernel/random/boot_id /sys/hypervisor/uuid 2>/dev/null
ls /sys/class/dmi/id/* /sys/firmware/* /sys/devices/virtual/dmi 2>/dev/null | head -3 | sed 's/^/DMI /'
echo done

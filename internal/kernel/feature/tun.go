package feature

import (
	"context"
	"os"
)

// TUN is devices whose other end is a descriptor, of which a sandbox's link is made.
var TUN = &Test{
	Name: "TUN devices", Fix: "load the kernel's tun module (modprobe tun), and let this user open /dev/net/tun (mode 0666, as udev sets it)",
	try: func(context.Context) (string, error) {
		f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
		if err != nil {
			return "", failed(err, "open /dev/net/tun")
		}
		return "", f.Close()
	},
}

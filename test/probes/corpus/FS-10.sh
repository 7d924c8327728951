# id: FS-10
# title: make device nodes
# expect: D EPERM
# timeout: 10
# escaped: ^MADE
# safe: ^done

cd /tmp
for device in "b 8 0" "b 254 0" "b 7 0" "c 1 1" "c 10 232" "c 10 200" "c 5 1"; do
	rm -f node
	mknod node $device 2>&1 && { echo "MADE $device"; dd if=node bs=512 count=1 2>&1 | head -c 64; }
done
echo done

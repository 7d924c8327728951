# id: FS-18
# title: overwrite init or the agent through proc
# expect: D neither the running programs nor their files can be written
# timeout: 20
# escaped: ^WROTE
# safe: ^done

for pid in 1 $(grep -l -a berm /proc/[0-9]*/comm 2>/dev/null | tr -dc '0-9\n'); do
	(exec 9>"/proc/$pid/exe") 2>/dev/null && echo "WROTE exe of $pid"
	(printf x >>"/proc/$pid/exe") 2>/dev/null && echo "WROTE exe of $pid"
	(printf x | dd of="/proc/$pid/mem" bs=1 seek=4194304 conv=notrunc) 2>/dev/null && echo "WROTE mem of $pid"
done
echo done

# id: RS-03
# title: memory bomb
# expect: L ended for memory in its own group
# timeout: 15
# limit: memory
# abuse: yes

blocks = []
while True:
    blocks.append(bytearray(b"x" * (1 << 25)))

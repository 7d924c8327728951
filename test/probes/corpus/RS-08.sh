# id: RS-08
# title: endless standard output
# expect: L memory of the agent and of the server stay flat
# timeout: 8
# where: server
# abuse: yes
# users: root

head -c 50G /dev/zero

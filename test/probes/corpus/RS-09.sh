# id: RS-09
# title: endless tiny lines on standard error
# expect: L memory of the agent and of the server stay flat
# timeout: 8
# where: server
# abuse: yes
# users: root

yes x >&2

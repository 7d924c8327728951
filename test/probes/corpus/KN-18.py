# id: KN-18
# title: system calls newer than the list
# expect: D ENOSYS for all but reviewed ones
# timeout: 10
# escaped: ^REACHED
# safe: ^done

# Reviewed and harmless: process_mrelease, futex_waitv, set_mempolicy_home_node, cachestat,
# fchmodat2, map_shadow_stack, futex_wake/wait/requeue, mseal, *xattrat, lsm_get_self_attr and
# lsm_list_modules, which tell a process of itself.
reviewed = {448, 449, 450, 451, 452, 453, 454, 455, 456, 459, 461, 462, 463, 464, 465, 466}
for nr in range(448, 512):
    outcome = raw(nr, -1, 0, 0, 0, 0, 0)[1]
    if outcome not in ("ENOSYS", "EPERM"):
        print("REACHED" if nr not in reviewed else "reviewed", nr, outcome)
print("done")

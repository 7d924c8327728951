package seccomp

import "golang.org/x/sys/unix"

const eperm = unix.EPERM

// allowed are the calls without a condition. Not in the list, hence ENOSYS:
// io_uring (its work passes by any filter), keyrings (their quota and the session
// keyring are not split by namespaces), userfaultfd, NUMA policy, kernel module
// and obsolete calls, and whatever a newer kernel brings until it was reviewed.
const allowed = `
	accept accept4 access alarm arch_prctl bind brk capget capset chdir chmod chown
	clock_getres clock_gettime clock_nanosleep close close_range connect
	copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl
	epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit
	exit_group faccessat faccessat2 fadvise64 fallocate fchdir fchmod fchmodat
	fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork
	fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex futex_requeue
	futex_wait futex_waitv futex_wake futimesat getcpu getcwd getdents getdents64
	getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid
	getppid getpriority getrandom getresgid getresuid getrlimit get_robust_list
	getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr
	inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel
	io_destroy io_getevents io_pgetevents ioprio_get ioprio_set io_setup io_submit
	kill landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown
	lgetxattr link linkat listen listxattr llistxattr lremovexattr lseek lsetxattr
	lstat madvise membarrier memfd_create mincore mkdir mkdirat mlock mlock2
	mlockall mmap mprotect mq_getsetattr mq_notify mq_open mq_timedreceive
	mq_timedsend mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock
	munlockall munmap nanosleep newfstatat open openat openat2 pause pidfd_open
	pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll
	prctl pread64 preadv preadv2 pselect6 ptrace pwrite64 pwritev
	pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg
	removexattr rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction
	rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend
	rt_sigtimedwait rt_tgsigqueueinfo sched_getaffinity sched_getattr
	sched_getparam sched_get_priority_max sched_get_priority_min
	sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr
	sched_setparam sched_setscheduler sched_yield select semctl semget semop
	semtimedop sendfile sendmmsg sendmsg sendto setfsgid setfsuid setgid setgroups
	setitimer setpgid setpriority setregid setresgid setresuid setreuid
	set_robust_list setsid setsockopt set_tid_address setuid setxattr shmat shmctl
	shmdt shmget shutdown sigaltstack signalfd signalfd4 splice stat statfs statx
	symlink symlinkat sync_file_range syncfs sysinfo tee tgkill time
	timer_create timer_delete timerfd_create timerfd_gettime timerfd_settime
	timer_getoverrun timer_gettime timer_settime times tkill truncate umask uname
	unlink unlinkat utime utimensat utimes vfork vmsplice wait4 waitid write writev
`

// denied are the calls that fail with EPERM: programs expect that of them where
// they lack rights, and report it better than ENOSYS.
const denied = `
	acct adjtimex bpf chroot clock_adjtime clock_settime create_module
	delete_module fanotify_init fanotify_mark finit_module fsconfig fsmount fsopen
	fspick get_kernel_syms init_module ioperm iopl kcmp kexec_file_load kexec_load
	listmount mount mount_setattr move_mount nfsservctl open_by_handle_at open_tree
	open_tree_attr perf_event_open pidfd_getfd pivot_root process_vm_readv
	process_vm_writev query_module quotactl quotactl_fd reboot setdomainname
	sethostname setns settimeofday statmount swapoff swapon syslog umount2 unshare
	vhangup
`

// notStrict are the calls of the default profile that the strict one refuses.
const notStrict = `
	io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit mq_getsetattr
	mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv
	msgsnd personality pkey_alloc pkey_free pkey_mprotect ptrace seccomp semctl
	semget semop semtimedop shmat shmctl shmdt shmget splice tee vmsplice
`

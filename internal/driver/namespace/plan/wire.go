package plan

// Control is the descriptor of init's end of the socket to its monitor
// (SOCK_SEQPACKET).
const Control = 3

// The first descriptors that come with a plan; those that steps refer to follow.
const (
	FDAgent  = iota // the guest agent's executable
	FDListen        // the listening socket that the agent serves
	FDConfig        // memfd with the agent's configuration
	FDReady         // write end of the pipe on which each agent reports that it serves
	FDCount         // how many there are
)

// AgentVariable is, in the environment of init, the path of the agent's executable where init
// runs on a kernel of the sandbox's own. That executes no memory file of the host's, and saves
// with its memory no descriptors of the host's but the standard streams: so there the socket to
// the monitor is descriptor 0, the one for the agent 1, of those that come with a plan only
// FDConfig is used, whose content init copies, and agents report to init, which says Ready.
const AgentVariable = "AGENT"

// MaxFDs is how many descriptors come with a plan at most: SCM_MAX_FD of the kernel.
const MaxFDs = 253

// MaxMessage bounds one message on the control socket in bytes.
const MaxMessage = 128 << 10

// The first byte of a message from the monitor to init.
const (
	// Trees: paths that init clones as detached mounts; before each a byte, TreeRead or
	// TreeWrite, and after it a zero byte. Only the monitor of an ordinary user sends it,
	// who may not do so outside.
	Trees = 't'
	// Mapped: ids are mapped now, and init becomes root inside by executing itself again.
	Mapped = 'm'
	// Remove: instead of becoming a sandbox, init deletes what is in the trees.
	Remove = 'd'
	// SetUp: the plan, with its descriptors.
	SetUp = 's'
	// Signal: one byte, the number of a signal for the command.
	Signal = 'k'
	// Renew: steps that give a sandbox another identity, when its memory goes on as another one;
	// answered with Renewed. Only on a kernel of its own.
	Renew = 'i'
	// Kernel: instead of becoming a sandbox, init carries the kernel of one, for an ordinary user, whose
	// monitor may mount nothing. Arguments, after each a zero byte, and one more after the last; then
	// the steps of a plan. The program is the first argument, in /bin. With it come its standard input
	// and output.
	Kernel = 'g'
	// Connect: the path of a socket that the kernel listens to, where init sees it; answered with
	// Connected. gVisor takes calls of its own user id and of root alone, as it sees them.
	Connect = 'c'
)

// Whether a tree can be written.
const (
	TreeRead  = 'r'
	TreeWrite = 'w'
)

// Exact is the kind of a tree whose path has no symbolic link: the capital letter.
func Exact(kind byte) byte { return kind - 'a' + 'A' }

// The first byte of a message from init to the monitor.
const (
	Started   = 's' // the plan is carried out and the agent or the command runs
	Ended     = 'e' // four bytes: the wait status of the command
	Failed    = 'f' // text: the step and what went wrong
	AgentLost = 'a' // text: how the agent ended; init starts it again
	Lowered   = 'l' // text: what the kernel did not grant
	LinkMade  = 'n' // with one descriptor: the other end of the link
	Ready     = 'r' // on a kernel of the sandbox's own: the agent serves
	Renewed   = 'i' // the identity is the new one
	Connected = 'c' // with one descriptor: a connection; or text: why there is none
	Watched   = 'w' // with one descriptor: the listener of Watch, for which executions wait from now on; or text: why there is none
)

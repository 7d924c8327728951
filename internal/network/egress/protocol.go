// Package egress is the process through which alone sandboxes reach networks: it reads
// their links, answers their DNS and lets through what each one's policy allows.
//
// It holds no secret and runs without rights. One connection to it stands for one sandbox:
// the first message brings the policy and, with it, the descriptor of the link; later ones
// replace the policy; the end of the connection is the end of the link. What it lets
// through and what not comes back over the same connection.
package egress

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// Protocol is the number of the protocol that this build speaks.
const Protocol = 1

// maxLine bounds a message in bytes: a policy has at most 256 KiB as it is written.
const maxLine = 4 << 20

// order is a message to the process.
type order struct {
	Protocol int             `json:"protocol,omitempty"` // of the first message
	Sandbox  berm.SandboxID  `json:"sandbox,omitempty"`  // of the first message
	Policy   json.RawMessage `json:"policy"`             // a policy.Policy
	Revision string          `json:"revision,omitempty"`
	Open     []string        `json:"open,omitempty"` // address ranges that the operator opens
}

// answer is a message from the process: the reply to an order, or what happened.
type answer struct {
	Done  bool     `json:"done,omitempty"`
	Error *failure `json:"error,omitempty"`
	Event *Event   `json:"event,omitempty"`
}

type failure struct {
	Kind berm.Kind `json:"kind"`
	Msg  string    `json:"msg"`
	Hint string    `json:"hint,omitempty"`
}

// Event is a flow that ended, a flow or a query that was denied.
type Event struct {
	Time     time.Time `json:"time"`               // of its beginning
	Kind     string    `json:"kind"`               // "flow" or "dns"
	Name     string    `json:"name,omitempty"`     // that the sandbox asked for
	Address  string    `json:"address,omitempty"`  // that was dialed, or was to be
	Port     uint16    `json:"port,omitempty"`     //
	Protocol string    `json:"protocol,omitempty"` // tcp or udp
	Action   string    `json:"action"`             // allow or deny
	Rule     string    `json:"rule,omitempty"`     // that decided
	Reason   string    `json:"reason,omitempty"`   // of a denial, one of a closed list
	Detail   string    `json:"detail,omitempty"`   // what would allow it, or what failed
	Up       int64     `json:"up,omitempty"`       // bytes out of the sandbox
	Down     int64     `json:"down,omitempty"`     // bytes into it
	Duration float64   `json:"seconds,omitempty"`
	Count    int       `json:"count,omitempty"` // of equal denials that one event stands for
	Revision string    `json:"revision,omitempty"`
}

// wire is one end of a connection.
type wire struct {
	conn  *net.UnixConn
	lines *bufio.Scanner
	link  *os.File // that came with the first bytes

	mu sync.Mutex
}

func newWire(conn *net.UnixConn) *wire {
	w := &wire{conn: conn}
	w.lines = bufio.NewScanner(w)
	w.lines.Buffer(nil, maxLine)
	return w
}

// Read takes bytes, and keeps the first descriptor that comes with some.
func (w *wire) Read(p []byte) (int, error) {
	rights := make([]byte, unix.CmsgSpace(4*4))
	n, rightsLen, _, _, err := w.conn.ReadMsgUnix(p, rights)
	if rightsLen > 0 {
		parts, _ := unix.ParseSocketControlMessage(rights[:rightsLen])
		for i := range parts {
			fds, _ := unix.ParseUnixRights(&parts[i])
			for _, fd := range fds {
				if unix.CloseOnExec(fd); w.link == nil {
					w.link = os.NewFile(uintptr(fd), "link")
				} else {
					unix.Close(fd)
				}
			}
		}
	}
	if n == 0 && err == nil {
		return 0, io.EOF
	}
	return n, err
}

func (w *wire) receive(v any) error {
	if !w.lines.Scan() {
		if err := w.lines.Err(); err != nil {
			return err
		}
		return io.EOF
	}
	return json.Unmarshal(w.lines.Bytes(), v)
}

// send writes a message, with a descriptor if one is given.
func (w *wire) send(v any, link *os.File) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	line = append(line, '\n')
	w.mu.Lock()
	defer w.mu.Unlock()
	if link != nil {
		raw, err := link.SyscallConn()
		if err != nil {
			return err
		}
		var sent error
		err = raw.Control(func(fd uintptr) {
			_, _, sent = w.conn.WriteMsgUnix(line[:1], unix.UnixRights(int(fd)), nil)
		})
		if err = errors.Join(err, sent); err != nil {
			return err
		}
		line = line[1:]
	}
	_, err = w.conn.Write(line)
	return err
}

func failed(err error) *failure {
	return &failure{Kind: berm.KindOf(err), Msg: err.Error(), Hint: berm.HintOf(err)}
}

func (f *failure) err() error { return &berm.Error{Kind: f.Kind, Msg: f.Msg, Hint: f.Hint} }

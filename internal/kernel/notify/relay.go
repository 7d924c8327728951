package notify

import (
	"encoding/json"
	"net"
	"os"
	"sync"
	"time"

	"github.com/berm-sandbox/berm/internal/kernel/rights"
	"golang.org/x/sys/unix"
)

// Told is what a Relay passes on: an event, or that there will be none.
type Told struct {
	Event
	Lost    uint64 // how many events were, until now
	Refused string `json:",omitempty"` // why there is no listener; the rest is empty then
}

// Bounds of a Relay.
const (
	maxRelayed = 4096             // events that wait for whoever takes them
	maxMessage = 128 << 10        // bytes of one message: paths and arguments, escaped
	relayTime  = 10 * time.Second // a connection that takes nothing for so long is given up
)

// Relay keeps what a Listener tells until another process takes it, one at a time. What finds no
// room is counted.
type Relay struct {
	again  func()        // see Listener.Again
	missed func() uint64 // see Listener.Lost

	mu     sync.Mutex
	queue  []Event
	lost   uint64
	last   Told // why there is no listener
	conn   *net.UnixConn
	wake   chan struct{} // has one when there is something to send
	closed bool          // nothing more comes
	sent   chan struct{} // closed by over when all is sent after that
	over   func()
}

// NewRelay returns one for the listener file of a Filter; without, refused says why there is none.
func NewRelay(file *os.File, refused string) (*Relay, *Listener) {
	sent := make(chan struct{})
	r := &Relay{
		wake: make(chan struct{}, 1), sent: sent, over: sync.OnceFunc(func() { close(sent) }),
		again: func() {}, missed: func() uint64 { return 0 }, last: Told{Refused: refused},
	}
	if file == nil {
		return r, nil
	}
	ready := make(chan struct{})
	l := Listen(file, func(e Event) { <-ready; r.tell(e) })
	r.again, r.missed = l.Again, l.Lost
	close(ready)
	return r, l
}

func (r *Relay) tell(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) >= maxRelayed {
		r.lost++
		e.close()
		return
	}
	if r.conn == nil { // its file would be kept open
		e.close()
		e.File = nil
	}
	r.queue = append(r.queue, e)
	r.rouse()
}

func (e *Event) close() {
	if e.File != nil {
		e.File.Close()
	}
}

// rouse is called with mu held.
func (r *Relay) rouse() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Serve sends events to the other end of conn, instead of the one before, and returns at once. Every
// message is one Told, with the descriptor of its file if it has one.
func (r *Relay) Serve(conn *net.UnixConn) {
	r.mu.Lock()
	before := r.conn
	r.conn = conn
	r.mu.Unlock()
	if before != nil {
		before.Close()
	}
	r.again()
	go r.serve(conn)
}

func (r *Relay) serve(conn *net.UnixConn) {
	defer conn.Close()
	if r.last.Refused != "" {
		_ = send(conn, r.last)
		r.over()
		return
	}
	for {
		r.mu.Lock()
		if r.conn != conn {
			r.mu.Unlock()
			r.rouse() // what woke this one was for the other
			return
		}
		queue, lost, closed := r.queue, r.lost+r.missed(), r.closed
		r.queue = nil
		r.mu.Unlock()
		for i, e := range queue {
			err := send(conn, Told{Event: e, Lost: lost})
			e.close()
			if err != nil { // the next one gets the rest
				for j := range queue[i:] {
					queue[i+j].close()
					queue[i+j].File = nil
				}
				r.mu.Lock()
				r.queue = append(queue[i:], r.queue...)
				if r.conn == conn {
					r.conn = nil
				}
				r.mu.Unlock()
				return
			}
		}
		if closed && len(queue) == 0 {
			r.over()
			return
		}
		if len(queue) == 0 {
			<-r.wake
		}
	}
}

func send(conn *net.UnixConn, t Told) error {
	text, err := json.Marshal(t)
	if err != nil || len(text) > maxMessage {
		return nil //nolint:nilerr // it cannot be
	}
	var rights []byte
	if t.File != nil {
		rights = unix.UnixRights(int(t.File.Fd()))
	}
	_ = conn.SetWriteDeadline(time.Now().Add(relayTime))
	_, _, err = conn.WriteMsgUnix(text, rights, nil)
	return err
}

// Close sends what is left, as far as somebody takes it in the time that there is.
func (r *Relay) Close(patience time.Duration) {
	r.mu.Lock()
	r.closed = true
	conn := r.conn
	r.rouse()
	r.mu.Unlock()
	if conn != nil {
		select {
		case <-r.sent:
		case <-time.After(patience):
			conn.Close()
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.queue {
		e.close()
	}
	r.queue = nil
}

// Receive reads the next event from a Relay. It ends with io.EOF when there are no more.
func Receive(conn *net.UnixConn, buffer []byte) (t Told, err error) {
	control := rights.Space(1)
	n, size, _, _, err := conn.ReadMsgUnix(buffer, control)
	if err != nil {
		return t, err
	}
	file := rights.File(control[:size], "exe")
	if err := json.Unmarshal(buffer[:n], &t); err != nil {
		if file != nil {
			file.Close()
		}
		return t, err
	}
	t.File = file
	return t, nil
}

// NewBuffer returns one for Receive.
func NewBuffer() []byte { return make([]byte, maxMessage) }

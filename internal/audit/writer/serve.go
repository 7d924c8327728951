package writer

import (
	"bufio"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/service"
)

// here is the directory of the log.
const here = "."

// server is the process at the other end.
type server struct {
	wire *service.Wire
	log  *trail.Log

	mu     sync.Mutex
	asked  uint64
	answer chan message // to the question asked last; nil when there is none
	asking sync.Mutex   // one question at a time
	gone   chan struct{}
	said   atomic.Bool // that it ends
}

// Writer is the process that writes a log.
type Writer struct {
	// Dir is the directory of the log, which the process works in: its user cannot reach it by name.
	Dir *os.File

	settings Settings
	records  *net.UnixConn
	anchors  []*os.File
}

// Inherit takes what a process was started with by Open. Kind Invalid.
func Inherit(settings Settings) (*Writer, error) {
	w := &Writer{Dir: service.File(1), settings: settings}
	var err error
	if w.records, err = service.Conn(service.File(0)); err != nil {
		return nil, berm.Errorf(berm.Invalid, "this command is started by berm")
	}
	for i := range settings.Anchors {
		w.anchors = append(w.anchors, service.File(2+i))
	}
	if err := w.Dir.Chdir(); err != nil {
		return nil, berm.Errorf(berm.Internal, "enter the directory of the audit log: %w", err)
	}
	return w, nil
}

// Readable are files outside of the directory that a writer opens by name.
func Readable() []string { return []string{trail.BootID} }

// Serve writes the log until the server ends.
func (w *Writer) Serve() error {
	owner, err := service.Owner()
	if err != nil {
		return err
	}
	s := &server{wire: service.NewWire(owner), gone: make(chan struct{})}
	var open atomic.Pointer[trail.Log]
	if err := service.Beat(func() {
		if l := open.Load(); l != nil {
			l.Seq() // not while it hangs
		}
	}); err != nil {
		return err
	}
	options := trail.Options{Log: slog.New(slog.NewTextHandler(s, nil)), Keep: w.settings.Keep, Limit: w.settings.Limit, Holds: s.holds, Successor: w.settings.After != unknown}
	for _, f := range w.anchors {
		options.Anchors = append(options.Anchors, trail.OpenAnchor{File: f})
	}
	for _, url := range w.settings.Witnesses {
		options.Anchors = append(options.Anchors, trail.WitnessAnchor(url))
	}
	log, err := openLog(options, w.settings.Wait)
	if err != nil {
		return errors.Join(err, s.wire.Send(message{Error: service.Failed(err)}))
	}
	open.Store(log)
	s.log = log
	taken, told, err := s.taken(w.settings.After)
	if err != nil {
		return errors.Join(err, s.wire.Send(message{Error: service.Failed(err)}), log.Close())
	}
	if err := s.wire.Send(message{Ready: &ready{protocol, log.Origin(), log.Seq(), taken, told}}); err != nil {
		return errors.Join(err, log.Close())
	}
	go s.attend()
	err = s.take(w.records)
	if err != nil { // what comes makes no sense
		return errors.Join(err, s.wire.Send(message{Log: err.Error()}), log.Close())
	}
	<-s.gone
	if s.said.Load() {
		return nil
	}
	return errors.Join(log.Emit(audit.Record{
		Actor: audit.Actor{Type: "system"}, Type: audit.ServerStop, Src: audit.OwnSource, Trust: audit.TrustHost, Outcome: audit.Failed,
		Reason: "it died without saying so",
	}), log.Close())
}

// openLog opens the log, when the writer before has let go of it.
func openLog(o trail.Options, wait time.Duration) (*trail.Log, error) {
	for end := time.Now().Add(wait); ; time.Sleep(20 * time.Millisecond) {
		log, err := trail.Open(here, o)
		switch {
		case berm.KindOf(err) != berm.Conflict:
			return log, err
		case time.Now().After(end):
			return nil, berm.Errorf(berm.Conflict, "another process writes the audit log").
				WithHint("that is `berm auditd` of a server that runs, or of one that died, which hangs: `fuser log.jsonl` in the directory of the log tells its number")
		}
	}
}

// taken counts the records after one that came from a server. told says that one of the log's own
// tells of some that are missing.
func (s *server) taken(after int64) (n int, told bool, err error) {
	if after == unknown {
		return 0, false, nil
	}
	if seq := s.log.Seq(); int64(seq) < after {
		return 0, false, berm.Errorf(berm.Internal, "the audit log has %d records, and the server was told of %d", seq, after)
	}
	for line, err := range trail.Dir(here).Records(uint64(after + 1)) {
		if err != nil {
			return n, told, berm.Errorf(berm.Internal, "audit log: %w", err)
		}
		if line.Src != audit.OwnSource {
			n++
		} else if line.Type == audit.Gap {
			data, _ := line.Data.(map[string]any)
			lost, _ := data["count"].(float64)
			told = told || lost > 0 // a line that was cut off comes again
		}
	}
	return n, told, nil
}

// take appends the records that come. It returns when no more do.
func (s *server) take(conn *net.UnixConn) error {
	defer conn.Close()
	in := bufio.NewReaderSize(conn, 64<<10)
	var buffer, out []byte
	var batch entries
	for {
		var err error
		if buffer, err = readBatch(in, buffer); err != nil {
			if berm.KindOf(err) == berm.Invalid {
				return err
			}
			return nil // it is gone, in the middle of a batch or between two
		}
		if err := batch.parse(buffer); err != nil {
			return err
		}
		if err := failpoint.Hit("audit/batch"); err != nil {
			return err
		}
		s.append(&batch)
		if err := failpoint.Hit("audit/answer"); err != nil {
			return err
		}
		if out, err = appendAnswer(out[:0], s.log.Seq(), batch.refused); err != nil {
			return err
		}
		if _, err := conn.Write(out); err != nil {
			return nil
		}
	}
}

// append appends the records of a batch.
func (s *server) append(batch *entries) {
	if len(batch.records) == 0 {
		return
	}
	err := s.log.EmitAll(batch.records)
	switch {
	case err == nil:
	case berm.KindOf(err) != berm.Invalid:
		batch.refused = append(batch.refused, refusal{all, service.Failed(err)})
	default: // one of them spoils it
		for i, r := range batch.records {
			if err := s.log.Emit(r); err != nil {
				batch.refused = append(batch.refused, refusal{batch.at[i], service.Failed(err)})
			}
		}
	}
}

// attend does what else the server says, until it ends.
func (s *server) attend() {
	defer close(s.gone)
	defer func() { _ = s.wire.Close() }()
	for {
		var m message
		if s.wire.Receive(&m) != nil {
			return
		}
		switch {
		case m.Holding != nil || m.Error != nil:
			s.mu.Lock()
			if m.ID == s.asked && s.answer != nil {
				s.answer <- m
				s.answer = nil
			}
			s.mu.Unlock()
		case m.Close:
			s.said.Store(true)
			s.reply(message{ID: m.ID}, s.log.Close(), nil)
			return // nothing can come after it
		case m.Begin:
			file, err := audit.Directory(here).CreateBlob()
			answer := message{ID: m.ID}
			if err == nil {
				answer.Name = filepath.Base(file.Name())
			}
			s.reply(answer, err, file)
		case m.Name != "":
			s.reply(message{ID: m.ID}, s.log.KeepBlob(m.Name, m.SHA256), nil)
		case m.Erase != nil:
			go func() { // which may take long
				done, err := s.log.Erase(*m.Erase, m.Dry)
				s.reply(message{ID: m.ID, Erase: &done}, err, nil)
			}()
		case len(m.EraseAll) > 0:
			go func() {
				done, err := s.log.EraseAll(m.EraseAll)
				s.reply(message{ID: m.ID, EraseAll: done}, err, nil)
			}()
		case m.Rotate:
			s.reply(message{ID: m.ID}, s.log.RotateKey(), nil)
		}
	}
}

// reply answers a question. The file goes with the answer.
func (s *server) reply(m message, err error, file *os.File) {
	if err != nil {
		m.Error = service.Failed(err)
	}
	_ = s.wire.Send(m, file) // a server that is gone needs none
	if file != nil {
		file.Close()
	}
}

// answerTime is how long a server may take to say what is held.
const answerTime = 10 * time.Second

// holds asks the server which sandboxes are held.
func (s *server) holds() ([]berm.SandboxID, error) {
	s.asking.Lock()
	defer s.asking.Unlock()
	answer := make(chan message, 1)
	s.mu.Lock()
	s.asked++
	s.answer = answer
	id := s.asked
	s.mu.Unlock()
	if err := s.wire.Send(message{ID: id, Holds: true}); err != nil {
		return nil, err
	}
	select {
	case m := <-answer:
		if m.Error != nil {
			return nil, m.Error.Err()
		}
		return m.Holding.Sandboxes, nil
	case <-s.gone:
		return nil, berm.Errorf(berm.Unavailable, "the server has ended")
	case <-time.After(answerTime):
		return nil, berm.Errorf(berm.Unavailable, "the server does not say it")
	}
}

// maxLog bounds what is said of what goes wrong, in bytes.
const maxLog = 4 << 10

// Write implements io.Writer for messages about what goes wrong.
func (s *server) Write(p []byte) (int, error) {
	text := strings.TrimSpace(string(p))
	return len(p), s.wire.Send(message{Log: text[:min(len(text), maxLog)]})
}

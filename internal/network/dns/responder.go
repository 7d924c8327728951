package dns

import (
	"encoding/binary"
	"io"
	"net"
	"time"

	"golang.org/x/time/rate"
)

// Limits of one sandbox's queries.
const (
	queryRate  = 100 // per second
	queryBurst = 200
	tcpIdle    = 10 * time.Second // between two queries on a connection
)

// Responder answers all queries of one sandbox, whatever server they are for, as often as it
// may ask. Its methods are safe for concurrent use.
type Responder struct {
	names   *Names
	allowed func(name string) bool
	admits  func() bool
	rate    *rate.Limiter
}

// NewResponder makes one; allowed is as for Answer, and admits says whether the sandbox may
// ask now: what it may not gets no answer.
func NewResponder(names *Names, allowed func(name string) bool, admits func() bool) *Responder {
	return &Responder{names: names, allowed: allowed, admits: admits, rate: rate.NewLimiter(queryRate, queryBurst)}
}

// Answer answers one datagram; nil is no answer, which the sandbox asks for again later.
func (r *Responder) Answer(message []byte) []byte {
	if !r.rate.Allow() || !r.admits() {
		return nil
	}
	return Answer(r.names, message, r.allowed)
}

// Serve answers the queries on a TCP connection to port 53 (RFC 7766), until the sandbox
// ends it, is silent, or asks what is no query.
func (r *Responder) Serve(conn net.Conn) error {
	defer conn.Close()
	var message [2 + maxQuery]byte
	for {
		_ = conn.SetDeadline(time.Now().Add(tcpIdle))
		if _, err := io.ReadFull(conn, message[:2]); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		n := int(binary.BigEndian.Uint16(message[:]))
		if n > maxQuery {
			return nil
		}
		if _, err := io.ReadFull(conn, message[2:2+n]); err != nil {
			return err
		}
		// A stream can wait where a datagram is lost.
		if wait := r.rate.Reserve().Delay(); wait > 0 {
			time.Sleep(min(wait, tcpIdle))
		}
		if !r.admits() {
			return nil
		}
		answer := Answer(r.names, message[2:2+n], r.allowed)
		if answer == nil {
			return nil
		}
		if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...)); err != nil {
			return err
		}
	}
}

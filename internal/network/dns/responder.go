package dns

import (
	"context"
	"encoding/binary"
	"io"
	"math"
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
	names  *Names
	zone   Zone
	admits func() bool
	rate   *rate.Limiter
}

// NewResponder makes one. admits says whether the sandbox may ask now: what it may not gets no
// answer.
func NewResponder(names *Names, zone Zone, admits func() bool) *Responder {
	return &Responder{names: names, zone: zone, admits: admits, rate: rate.NewLimiter(queryRate, queryBurst)}
}

// Answer answers one datagram; nil is no answer, which the sandbox asks for again later.
func (r *Responder) Answer(ctx context.Context, message []byte) []byte {
	if !r.rate.Allow() || !r.admits() {
		return nil
	}
	return Answer(ctx, r.names, message, r.zone, udpSize)
}

// Serve answers the queries on a TCP connection to port 53 (RFC 7766), until the sandbox
// ends it, is silent, or asks what is no query.
func (r *Responder) Serve(ctx context.Context, conn net.Conn) error {
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
		_ = conn.SetDeadline(time.Now().Add(maxPatience + tcpIdle))
		answer := Answer(ctx, r.names, message[2:2+n], r.zone, math.MaxUint16)
		if answer == nil {
			return nil
		}
		if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...)); err != nil {
			return err
		}
	}
}

package egress

import (
	"net"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/service"
)

// A service that refuses and leaves at once has said why.
func TestRefusalArrives(t *testing.T) {
	for range 200 {
		conn, file, err := service.Connect()
		if err != nil {
			t.Fatal(err)
		}
		other, err := net.FileConn(file)
		if file.Close(); err != nil {
			t.Fatal(err)
		}
		go func() {
			defer other.Close()
			wire := service.NewWire(other.(*net.UnixConn))
			var o Order
			if err := wire.Receive(&o); err != nil {
				t.Error(err)
			}
			_ = wire.Send(Answer{Error: &service.Failure{Kind: berm.Invalid, Msg: "the reason"}}, nil)
		}()
		_, _, _, err = Prepare(t.Context(), conn, "", Policy{}, nil, nil, nil, func(Event) {})
		if berm.KindOf(err) != berm.Invalid || !strings.Contains(err.Error(), "the reason") {
			t.Fatal(err)
		}
	}
}

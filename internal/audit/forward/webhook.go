package forward

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/webhook"
)

// webhookTime bounds one request.
const webhookTime = 10 * time.Second

// Webhook sends each record as an event of CloudEvents 1.0 in the structured mode of its HTTP
// binding.
type Webhook struct {
	hook *webhook.Hook
	log  string // name of the log
}

// event is the envelope.
type event struct {
	SpecVersion     string          `json:"specversion"`
	ID              string          `json:"id"`
	Source          string          `json:"source"`
	Type            string          `json:"type"`
	Subject         string          `json:"subject,omitempty"`
	Team            berm.Team       `json:"team,omitempty"` // an extension
	Time            time.Time       `json:"time"`
	DataContentType string          `json:"datacontenttype"`
	Data            json.RawMessage `json:"data"`
}

// NewWebhook sends to an address, signed with the secret in a file, the records of a log of a
// name. Kinds as of webhook.New.
func NewWebhook(address, secretFile, log string) (*Webhook, error) {
	h, err := webhook.New(address, secretFile)
	if err != nil {
		return nil, err
	}
	return &Webhook{hook: h, log: log}, nil
}

// TargetName names the file that tells how far a target of a kind, at an address, got.
func TargetName(kind, address string) string {
	sum := sha256.Sum256([]byte(address))
	return kind + "-" + hex.EncodeToString(sum[:8])
}

// AtOnce implements Target.
func (w *Webhook) AtOnce() int { return 1 }

// Send implements Target. A receiver has an event when it answers with 2xx; it tells repeated
// ones by their source and id.
func (w *Webhook) Send(ctx context.Context, lines []trail.Line) error {
	line := lines[0]
	body, err := json.Marshal(event{
		SpecVersion: "1.0", ID: strconv.FormatUint(line.Seq, 10), Source: "/berm/" + w.log, Type: "dev.berm." + string(line.Type),
		Subject: string(line.Sandbox), Team: line.Team, Time: line.Time, DataContentType: "application/json", Data: line.Raw,
	})
	if err != nil {
		return berm.Errorf(berm.Internal, "event: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, webhookTime)
	defer cancel()
	status, _, err := w.hook.Post(ctx, "application/cloudevents+json; charset=utf-8", body)
	if err == nil && (status < 200 || status > 299) {
		err = berm.Errorf(berm.Unavailable, "the receiver answers %d %s", status, http.StatusText(status))
	}
	return err
}

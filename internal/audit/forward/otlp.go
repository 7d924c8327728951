package forward

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	common "go.opentelemetry.io/proto/otlp/common/v1"
	logs "go.opentelemetry.io/proto/otlp/logs/v1"
	resource "go.opentelemetry.io/proto/otlp/resource/v1"
	"google.golang.org/protobuf/proto"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
)

const (
	otlpTime   = 30 * time.Second // bounds one request
	otlpAtOnce = 512              // records in one request
)

// OTLP sends records as logs of OpenTelemetry, by OTLP over HTTP in protobuf.
type OTLP struct {
	url     string
	headers http.Header
	log     string // name of the log
	client  *http.Client
}

// NewOTLP sends to an endpoint, which gets /v1/logs appended unless it has a path, with headers
// NAME=VALUE, the records of a log of a name. Kind Invalid.
func NewOTLP(endpoint string, headers []string, log string) (*OTLP, error) {
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, berm.Errorf(berm.Invalid, "%q is not the http or https URL of an OTLP endpoint", endpoint)
	}
	if strings.Trim(u.Path, "/") == "" {
		u.Path = "/v1/logs"
	}
	o := &OTLP{
		url: u.String(), headers: http.Header{}, log: log,
		client: &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }},
	}
	for _, h := range headers {
		name, value, ok := strings.Cut(h, "=")
		if !ok || name == "" || strings.ContainsAny(name+value, "\r\n") {
			return nil, berm.Errorf(berm.Invalid, "a header of OTLP is NAME=VALUE")
		}
		o.headers.Set(name, value)
	}
	return o, nil
}

// AtOnce implements Target.
func (o *OTLP) AtOnce() int { return otlpAtOnce }

// Send implements Target.
func (o *OTLP) Send(ctx context.Context, lines []trail.Line) error {
	records := make([]*logs.LogRecord, len(lines))
	for i, line := range lines {
		records[i] = logRecord(line)
	}
	body, err := proto.Marshal(&logs.LogsData{ResourceLogs: []*logs.ResourceLogs{{
		Resource:  &resource.Resource{Attributes: attributes("service.name", "berm", "host.name", lines[0].Host, "berm.log", o.log)},
		ScopeLogs: []*logs.ScopeLogs{{Scope: &common.InstrumentationScope{Name: "berm.audit"}, LogRecords: records}},
	}}})
	if err != nil {
		return berm.Errorf(berm.Internal, "OTLP: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, otlpTime)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, o.url, bytes.NewReader(body))
	if err != nil {
		return berm.Errorf(berm.Internal, "OTLP: %w", err)
	}
	request.Header = o.headers.Clone()
	request.Header.Set("Content-Type", "application/x-protobuf")
	response, err := o.client.Do(request)
	if err != nil {
		var failed *url.Error
		if errors.As(err, &failed) {
			err = failed.Err
		}
		return berm.Errorf(berm.Unavailable, "OTLP: %w", err)
	}
	defer response.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(response.Body, 64<<10))
	if response.StatusCode/100 != 2 {
		return berm.Errorf(berm.Unavailable, "OTLP: the endpoint answers %s", response.Status)
	}
	return nil
}

// logRecord is a record as OpenTelemetry has it: what it tells is the body, what finds it are
// attributes.
func logRecord(line trail.Line) *logs.LogRecord {
	severity := logs.SeverityNumber_SEVERITY_NUMBER_INFO
	switch {
	case line.Outcome == audit.Denied, line.Type == audit.Gap, line.Type == audit.CredentialLeak, line.Type == audit.CredentialMisuse:
		severity = logs.SeverityNumber_SEVERITY_NUMBER_WARN
	case line.Outcome == audit.Failed:
		severity = logs.SeverityNumber_SEVERITY_NUMBER_ERROR
	}
	at := uint64(line.Time.UnixNano())
	record := &logs.LogRecord{
		TimeUnixNano: at, ObservedTimeUnixNano: at, SeverityNumber: severity, EventName: "berm." + string(line.Type),
		Attributes: attributes(
			"sandbox.id", string(line.Sandbox), "berm.team", string(line.Team), "berm.seq", fmt.Sprint(line.Seq), "berm.actor.type", line.Actor.Type, "berm.actor.id", line.Actor.ID,
			"berm.src", line.Src, "berm.trust", string(line.Trust), "berm.outcome", string(line.Outcome), "berm.reason", line.Reason,
		),
	}
	if data, err := json.Marshal(line.Data); err == nil && line.Data != nil {
		record.Body = text(string(data))
	}
	if id, err := hex.DecodeString(line.TraceID); err == nil && len(id) == 16 {
		record.TraceId = id
	}
	return record
}

// attributes makes attributes of names and values; empty ones are left out.
func attributes(pairs ...string) []*common.KeyValue {
	var all []*common.KeyValue
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			all = append(all, &common.KeyValue{Key: pairs[i], Value: text(pairs[i+1])})
		}
	}
	return all
}

func text(s string) *common.AnyValue {
	return &common.AnyValue{Value: &common.AnyValue_StringValue{StringValue: strings.ToValidUTF8(s, "\uFFFD")}}
}

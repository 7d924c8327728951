package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
)

// bodyLimit bounds a request: agents send some 100 KB of instructions each time.
const bodyLimit = 16 << 20

// model answers requests with the steps of a script. It keeps no state: how many tool
// results a request carries says which step comes next, whatever else was asked between.
type model struct {
	steps []step

	mu  sync.Mutex
	log *json.Encoder
}

func newModel(steps []step, log io.Writer) http.Handler {
	m := &model{steps: steps, log: json.NewEncoder(log)}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/messages", m.messages)
	mux.HandleFunc("POST /v1/responses", m.responses)
	mux.HandleFunc("HEAD /", func(http.ResponseWriter, *http.Request) {}) // claude-code opens its connection ahead
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.record(entry{Request: r.Method + " " + r.URL.Path})
		mux.ServeHTTP(w, r)
	})
}

// entry is one line of the log: a request, the model that it asked for, or a step and what
// the agent's tool gave.
type entry struct {
	Request string          `json:"request,omitempty"`
	Model   string          `json:"model,omitempty"`
	Step    *step           `json:"step,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
}

func (m *model) record(e entry) {
	m.mu.Lock()
	defer m.mu.Unlock()
	_ = m.log.Encode(e)
}

// next is the step after those whose results are given. A request that offers no tools is
// one of the agent's own, a title for the conversation perhaps, and gets any words.
func (m *model) next(results []json.RawMessage, tools int) step {
	n := len(results)
	if tools == 0 || n >= len(m.steps) {
		return step{Say: "Nothing more to do."}
	}
	if n > 0 {
		m.record(entry{Step: &m.steps[n-1], Result: results[n-1]})
	}
	return m.steps[n]
}

// messages serves https://docs.anthropic.com/en/api/messages-streaming.
func (m *model) messages(w http.ResponseWriter, r *http.Request) {
	var request struct {
		Model    string
		Tools    []json.RawMessage
		Messages []struct{ Content json.RawMessage }
	}
	if !decode(w, r, &request) {
		return
	}
	m.record(entry{Model: request.Model})
	var results []json.RawMessage
	for _, message := range request.Messages {
		var blocks []struct {
			Type    string
			Content json.RawMessage
		}
		if json.Unmarshal(message.Content, &blocks) != nil {
			continue // a plain string
		}
		for _, block := range blocks {
			if block.Type == "tool_result" {
				results = append(results, block.Content)
			}
		}
	}
	step := m.next(results, len(request.Tools))
	id := len(results)
	block, delta, reason := object{"type": "text", "text": ""}, object{"type": "text_delta", "text": step.Say}, "end_turn"
	if call, ok := step.claude(); ok {
		input, _ := json.Marshal(call.input)
		block = object{"type": "tool_use", "id": fmt.Sprintf("toolu_%d", id), "name": call.tool, "input": object{}}
		delta = object{"type": "input_json_delta", "partial_json": string(input)}
		reason = "tool_use"
	}
	stream(w,
		object{"type": "message_start", "message": object{
			"id": fmt.Sprintf("msg_%d", id), "type": "message", "role": "assistant", "model": request.Model,
			"content": []any{}, "stop_reason": nil, "usage": object{"input_tokens": 1, "output_tokens": 1},
		}},
		object{"type": "content_block_start", "index": 0, "content_block": block},
		object{"type": "content_block_delta", "index": 0, "delta": delta},
		object{"type": "content_block_stop", "index": 0},
		object{"type": "message_delta", "delta": object{"stop_reason": reason}, "usage": object{"output_tokens": 1}},
		object{"type": "message_stop"},
	)
}

// responses serves https://platform.openai.com/docs/api-reference/responses-streaming, as
// far as codex reads it.
func (m *model) responses(w http.ResponseWriter, r *http.Request) {
	var request struct {
		Model string
		Tools []json.RawMessage
		Input []struct {
			Type   string
			Output json.RawMessage
		}
	}
	if !decode(w, r, &request) {
		return
	}
	m.record(entry{Model: request.Model})
	var results []json.RawMessage
	for _, item := range request.Input {
		if item.Type == "function_call_output" {
			results = append(results, item.Output)
		}
	}
	step := m.next(results, len(request.Tools))
	id := len(results)
	item := object{
		"type": "message", "id": fmt.Sprintf("msg_%d", id), "role": "assistant",
		"content": []any{object{"type": "output_text", "text": step.Say}},
	}
	if call, ok := step.codex(); ok {
		arguments, _ := json.Marshal(call.input)
		item = object{
			"type": "function_call", "id": fmt.Sprintf("fc_%d", id), "call_id": fmt.Sprintf("call_%d", id),
			"name": call.tool, "arguments": string(arguments),
		}
	}
	response := fmt.Sprintf("resp_%d", id)
	stream(w,
		object{"type": "response.created", "response": object{"id": response}},
		object{"type": "response.output_item.done", "output_index": 0, "item": item},
		object{"type": "response.completed", "response": object{"id": response, "usage": object{
			"input_tokens": 1, "output_tokens": 1, "total_tokens": 2,
		}}},
	)
}

type object map[string]any

// decode reads a request's body, or answers that it cannot.
func decode(w http.ResponseWriter, r *http.Request, into any) bool {
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, bodyLimit)).Decode(into); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return false
	}
	return true
}

// stream sends server-sent events.
func stream(w http.ResponseWriter, events ...object) {
	w.Header().Set("Content-Type", "text/event-stream")
	for _, event := range events {
		data, _ := json.Marshal(event)
		_, _ = fmt.Fprintf(w, "event: %s\ndata: %s\n\n", event["type"], data)
	}
}

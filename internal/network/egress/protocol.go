// Package egress is how the owner of a sandbox talks to the network service, the process
// through which alone sandboxes reach networks.
//
// One connection stands for one sandbox: the first message brings the policy and, with it,
// the descriptor of the link; later ones replace the policy; the end of the connection is
// the end of the link. What is let through and what not comes back over the same connection.
package egress

import (
	"encoding/json"
	"net/netip"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/service"
	"github.com/berm-sandbox/berm/internal/trust/root"
)

// Protocol is the number of the protocol that this build speaks.
const Protocol = 1

// Policy is what a sandbox may reach, in one of three forms. The service compiles it: whoever
// runs a sandbox need not link what that takes.
type Policy struct {
	JSON    json.RawMessage `json:"json,omitempty"`    // a document of package policy
	YAML    string          `json:"yaml,omitempty"`    // one as people write it
	Source  string          `json:"source,omitempty"`  // the name of its file, for messages
	Entries []string        `json:"entries,omitempty"` // added before its rules: HOST[:PORT]
	Attach  []Attachment    `json:"attach,omitempty"`  // added to its own
	// Endpoints are names that there are inside for clients of the service of credentials alone.
	Endpoints []Endpoint `json:"endpoints,omitempty"`
	// Revision names this state of the policy in events.
	Revision string `json:"revision,omitempty"`
	// Upstream is the way to what it allows; the zero value is the direct one.
	Upstream Upstream `json:"upstream,omitzero"`
}

// Attachment says which hosts a credential is for: requests to them are looked into.
type Attachment struct {
	Credential string   `json:"credential"`
	Hosts      []string `json:"hosts"`
}

// Order is a message to the service, or to that of credentials.
type Order struct {
	Protocol int            `json:"protocol,omitempty"` // of the first message
	Sandbox  berm.SandboxID `json:"sandbox,omitempty"`  // of the first message
	Policy   Policy         `json:"policy"`
	Reply    *Reply         `json:"reply,omitempty"` // the answer to a question; the order has nothing else then
	Open     []string       `json:"open,omitempty"`  // address ranges that the operator opens
	// Frames says that the link, which comes with the message, carries Ethernet frames.
	Frames bool `json:"frames,omitempty"`
	// Trust asks, with the first message, what the sandbox has to trust for requests to be
	// looked into, where its programs are those of Root. The link comes with the second message
	// then.
	Trust bool       `json:"trust,omitempty"`
	Root  *root.Root `json:"root,omitempty"` // nil: this machine's own
	// Door says that a descriptor comes with the message, before the link: the connection between
	// the network service and that of credentials, which looks into requests in its stead.
	Door bool `json:"door,omitempty"`

	// The rest is for the service of credentials alone. Its first message comes with its end of
	// that connection, unless it comes later.

	// Authority says that a descriptor comes, after the door: what an earlier service had kept
	// (Answer.Keep). Without it the sandbox gets a new authority.
	Authority bool `json:"authority,omitempty"`
	// Credentials replace those of before when Bind is set, as it is in the first message.
	Bind bool `json:"bind,omitempty"`
	// The secrets are in a file in memory, whose descriptor comes last.
	Credentials []Credential `json:"credentials,omitempty"`
	// Mask, when it is set, is all that the message is about: a text to be masked. So is
	// MaskStream: a connection comes with it, by which a stream comes and goes back masked.
	Mask       []byte `json:"mask,omitempty"`
	MaskStream bool   `json:"maskStream,omitempty"`
}

// Credential is a secret and the requests that get it: of a service that is known by its
// name, or as the fields say.
type Credential struct {
	Name         string   `json:"name"`
	Service      string   `json:"service,omitempty"`
	Hosts        []string `json:"hosts,omitempty"` // NAME[:PORT]
	Header       string   `json:"header,omitempty"`
	Prefix       string   `json:"prefix,omitempty"` // in the header
	User         string   `json:"user,omitempty"`   // the secret is this user's password
	Cookie       string   `json:"cookie,omitempty"`
	Query        string   `json:"query,omitempty"`
	Methods      []string `json:"methods,omitempty"`
	Paths        []string `json:"paths,omitempty"`
	Env          string   `json:"env,omitempty"`          // the variable inside of what stands for it
	Swap         bool     `json:"swap,omitempty"`         // it goes where that was sent, and nowhere else
	Endpoint     bool     `json:"endpoint,omitempty"`     // the first host has a base URL inside, without TLS
	URL          string   `json:"url,omitempty"`          // the variable inside of that base URL
	Repositories []string `json:"repositories,omitempty"` // git over HTTPS
	Push         []string `json:"push,omitempty"`         // refs that git may write
	Value        []byte   `json:"-"`
	// Missing says that there is no secret any more: requests that would get it are refused.
	Missing bool `json:"missing,omitempty"`
	// Field is what Header is set to, with references ${e2b.secrets.NAME} to Values. There is no
	// Value then.
	Field  []byte            `json:"-"`
	Values map[string][]byte `json:"-"`
	Wants  []string          `json:"wants,omitempty"` // the names of Values, set by Broker and Bind
}

// Wipe forgets the secrets of a credential.
func (c *Credential) Wipe() {
	clear(c.Value)
	clear(c.Field)
	for _, v := range c.Values {
		clear(v)
	}
}

// Endpoint is a name inside that stands for a host of a credential: its clients speak plain
// HTTP to it, which the service of credentials passes on by TLS.
type Endpoint struct {
	Name string `json:"name"` // inside, at port 80
	Host string `json:"host"`
	Port uint16 `json:"port"`
}

// EndpointName is the name inside of the endpoint of a credential. The domain is reserved for
// names of private networks.
func EndpointName(credential string) string { return credential + ".broker.internal" }

// Flow is a connection of the sandbox's that the network service hands to that of
// credentials, with a descriptor.
type Flow struct {
	Name      string       `json:"name"`
	Port      uint16       `json:"port"`
	Endpoint  string       `json:"endpoint,omitempty"` // the name by which the sandbox reaches it
	Addresses []netip.Addr `json:"addresses"`          // that may be dialed
	// ID tells flows apart. A message with Cut is about one that came before: it is denied now.
	ID  uint64 `json:"id"`
	Cut *Cut   `json:"cut,omitempty"`
	// Proxies are the addresses of the names of proxies on the way.
	Proxies map[string][]netip.Addr `json:"proxies,omitempty"`
}

// Cut is why the network service ends a flow that was handed over.
type Cut struct {
	Reason string `json:"reason"`
	Rule   string `json:"rule,omitempty"`
	Detail string `json:"detail"`
}

// Answer is a message from the service: the reply to an order, or what happened.
type Answer struct {
	Done     bool     `json:"done,omitempty"`
	Warnings []string `json:"warnings,omitempty"` // about the policy
	Asks     bool     `json:"asks,omitempty"`     // the policy has rules that ask
	Trust    *Trust   `json:"trust,omitempty"`    // when it was asked for and is needed
	// Authority is the certificate, in PEM, of the sandbox's authority, from the service of
	// credentials. Keep says that a descriptor comes with it, which a later service needs.
	Authority string           `json:"authority,omitempty"`
	Keep      bool             `json:"keep,omitempty"`
	Error     *service.Failure `json:"error,omitempty"`
	Event     *Event           `json:"event,omitempty"`
	// Attach, Env and Endpoints are from the service of credentials: what the policy of the
	// network service has to attach, variables for the programs inside, and names there.
	Attach    []Attachment      `json:"attach,omitempty"`
	Env       map[string]string `json:"env,omitempty"`
	Endpoints []Endpoint        `json:"endpoints,omitempty"`
	Masked    []byte            `json:"masked,omitempty"` // Order.Mask without secrets
}

// Trust is what makes programs inside trust the authority of the sandbox: one that is made for
// it, whose key the service keeps in memory.
type Trust struct {
	Files []root.File       `json:"files"`
	Env   map[string]string `json:"env"`
}

// Event is a flow that ended, a flow or a query that was denied, or a request.
type Event struct {
	Time time.Time `json:"time"` // of its beginning
	// Kind is "flow", "dns", "http" for a request in a flow, Asks, or one that begins with
	// "credential.".
	Kind     string  `json:"kind"`
	Name     string  `json:"name,omitempty"`     // that the sandbox asked for
	Address  string  `json:"address,omitempty"`  // that was dialed, or was to be
	Port     uint16  `json:"port,omitempty"`     //
	Protocol string  `json:"protocol,omitempty"` // tcp or udp
	Action   string  `json:"action"`             // allow or deny, or ask of the kind Asks
	Rule     string  `json:"rule,omitempty"`     // that decided
	Reason   string  `json:"reason,omitempty"`   // of a denial, one of a closed list
	Detail   string  `json:"detail,omitempty"`   // what would allow it, or what failed
	Up       int64   `json:"up,omitempty"`       // bytes out of the sandbox
	Down     int64   `json:"down,omitempty"`     // bytes into it
	Duration float64 `json:"seconds,omitempty"`
	Method   string  `json:"method,omitempty"` // of a request, which was looked into
	Path     string  `json:"path,omitempty"`
	Status   int     `json:"status,omitempty"` // that the sandbox got
	Count    int     `json:"count,omitempty"`  // of equal denials that one event stands for
	Revision string  `json:"revision,omitempty"`
	// Unreached says that the flow was allowed and could not be connected outside, or its request got no answer.
	Unreached bool `json:"unreached,omitempty"`
	// Credential is the name of the one that it is about.
	Credential string `json:"credential,omitempty"`
}

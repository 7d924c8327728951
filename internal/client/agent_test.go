package client

import "testing"

func TestOrigin(t *testing.T) {
	const id = "i0abcdefghijklmnopqrs"
	for _, test := range []struct{ url, sandboxURL, domain, want string }{
		{"http://127.0.0.1:7676", "", "", "http://127.0.0.1:7676"},
		{"http://127.0.0.1:7676/prefix", "", "berm.test:7676", "http://127.0.0.1:7676"},
		{"https://[::1]:7676", "", "berm.test", "https://[::1]:7676"},
		{"http://localhost:7676", "", "berm.test", "http://localhost:7676"},
		{"https://api.berm.test:7676", "", "berm.test:7676", "https://49983-" + id + ".berm.test:7676"},
		{"https://api.berm.test:7676", "", "", "https://49983-" + id + ".berm.test:7676"},
		{"https://other.test", "", "berm.test", "https://49983-" + id + ".berm.test"},
		{"http://server:7676", "", "", "http://server:7676"}, // a server without a domain goes by every name
		{"https://api.berm.test", "https://sandboxes.test", "berm.test", "https://sandboxes.test"},
	} {
		c, err := New(Config{URL: test.url, SandboxURL: test.sandboxURL})
		if err != nil {
			t.Fatal(err)
		}
		if got := c.origin(&Sandbox{ID: id, Domain: test.domain}); got != test.want {
			t.Errorf("%+v: %s", test, got)
		}
	}
}

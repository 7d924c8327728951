package egress

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
)

// Secrets come as they went, by the file alone.
func TestSecrets(t *testing.T) {
	credentials := []Credential{
		{Name: "a", Value: []byte("CANARY-one")},
		{Name: "none", Missing: true},
		{Name: "field", Header: "X", Field: []byte("Bearer ${e2b.secrets.x}"), Values: map[string][]byte{"x": []byte("CANARY-x"), "b": []byte("CANARY-b"), "gone": nil}},
	}
	file, err := packSecrets(credentials)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteAt([]byte("x"), 0); err == nil {
		t.Error("the file can be changed")
	}
	text, err := json.Marshal(credentials)
	if err != nil || strings.Contains(string(text), "CANARY") {
		t.Errorf("the message: %s, %v", text, err)
	}
	var came []Credential
	if err := json.Unmarshal(text, &came); err != nil {
		t.Fatal(err)
	}
	if err := Unpack(came, file); err != nil {
		t.Fatal(err)
	}
	if string(came[0].Value) != "CANARY-one" || len(came[1].Value) > 0 || !came[1].Missing || string(came[2].Field) != "Bearer ${e2b.secrets.x}" ||
		string(came[2].Values["x"]) != "CANARY-x" || string(came[2].Values["b"]) != "CANARY-b" || len(came[2].Values) != 3 {
		t.Errorf("%+v", came)
	}
	for i := range came {
		came[i].Wipe()
	}
	if strings.Contains(string(came[0].Value)+string(came[2].Field)+string(came[2].Values["x"]), "CANARY") {
		t.Errorf("not wiped: %+v", came)
	}

	one := []Credential{{Name: "a", Value: []byte("x")}}
	wrong := map[string]func() (*os.File, error){
		"nothing":      func() (*os.File, error) { return nil, nil },
		"a device":     func() (*os.File, error) { return os.Open(os.DevNull) },
		"too short":    func() (*os.File, error) { return MemoryFile([]byte{0, 0, 0}) },
		"too long":     func() (*os.File, error) { return MemoryFile(make([]byte, 100)) },
		"beyond":       func() (*os.File, error) { return MemoryFile([]byte{255, 255, 255, 255, 1}) },
		"of none":      func() (*os.File, error) { return packSecrets(nil) },
		"of too large": func() (*os.File, error) { return MemoryFile(make([]byte, maxSecrets+1)) },
	}
	for name, make := range wrong {
		file, err := make()
		if err != nil {
			t.Fatal(err)
		}
		if err := Unpack(one, file); berm.KindOf(err) != berm.Invalid || err == nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := packSecrets([]Credential{{Value: make([]byte, maxSecrets)}}); berm.KindOf(err) != berm.Invalid {
		t.Errorf("too many: %v", err)
	}
}

func FuzzUnpack(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x01a\x00\x00\x00\x00"), "a")
	f.Fuzz(func(t *testing.T, data []byte, want string) {
		file, err := MemoryFile(data)
		if err != nil {
			t.Skip(err)
		}
		credentials := []Credential{{Wants: []string{want}}, {}}
		if Unpack(credentials, file) == nil {
			again, err := packSecrets(credentials)
			if err != nil {
				t.Fatal(err)
			}
			got, err := ReadMemory(again, maxSecrets)
			if err != nil || string(got) != string(data) {
				t.Errorf("%q became %q, %v", data, got, err)
			}
		}
	})
}

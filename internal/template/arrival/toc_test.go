package arrival

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/containerd/stargz-snapshotter/estargz"

	"github.com/berm-sandbox/berm"
)

const zeros = "sha256:0000000000000000000000000000000000000000000000000000000000000000"

// Tables that a hostile builder makes, whose digest an image may well name, are refused with the
// entry named, and never taken for less than they say.
func TestHostileTables(t *testing.T) {
	defer func(before int) { maxRecords = before }(maxRecords)
	maxRecords = 1000
	chunk := func(more string) string {
		return fmt.Sprintf(`{"entries":[{"name":"f","type":"reg","size":10,"chunkDigest":%q,%s]}`, zeros, more)
	}
	for name, c := range map[string]struct {
		table string
		kind  berm.Kind
		says  string
	}{
		"not JSON":                     {`x`, berm.Invalid, "table"},
		"a list":                       {`[]`, berm.Invalid, "table"},
		"cut":                          {`{"entries":[{"name":"f"`, berm.Invalid, "table"},
		"two lists":                    {`{"entries":[],"entries":[]}`, berm.Invalid, "two lists"},
		"unknown type":                 {`{"entries":[{"name":"f","type":"door"}]}`, berm.Invalid, `"f"`},
		"negative size":                {`{"entries":[{"name":"f","type":"reg","size":-1}]}`, berm.Invalid, `"f"`},
		"bad time":                     {`{"entries":[{"name":"f","type":"dir","modtime":"now"}]}`, berm.Invalid, `"f"`},
		"negative offset":              {chunk(`"offset":-1}`), berm.Invalid, `"f"`},
		"offset behind":                {chunk(`"offset":1000}`), berm.Invalid, `"f"`},
		"negative inner":               {chunk(`"innerOffset":-1}`), berm.Invalid, `"f"`},
		"chunk too large":              {chunk(`"chunkSize":11}`), berm.Invalid, `"f"`},
		"negative chunk":               {chunk(`"chunkSize":-1}`), berm.Invalid, `"f"`},
		"chunks missing":               {chunk(`"chunkSize":5}`), berm.Invalid, `5 of 10`},
		"chunk elsewhere":              {chunk(`"chunkOffset":3}`), berm.Invalid, `"f"`},
		"overlap":                      {chunk(`"offset":5,"chunkSize":5},{"type":"chunk","offset":5,"innerOffset":2,"chunkOffset":5,"chunkDigest":"` + zeros + `"}`), berm.Invalid, `overlaps`},
		"backwards":                    {chunk(`"offset":5,"chunkSize":5},{"type":"chunk","offset":4,"chunkOffset":5,"chunkDigest":"` + zeros + `"}`), berm.Invalid, `overlaps`},
		"chunk of nothing":             {`{"entries":[{"type":"chunk"}]}`, berm.Invalid, "no file"},
		"chunk of another":             {chunk(`"chunkSize":5},{"name":"g","type":"chunk","chunkOffset":5}`), berm.Invalid, `"g"`},
		"no digest":                    {`{"entries":[{"name":"f","type":"reg","size":1}]}`, berm.Unsupported, `"f"`},
		"a digest of else":             {`{"entries":[{"name":"f","type":"reg","size":1,"chunkDigest":"sha256:0"}]}`, berm.Unsupported, `"f"`},
		"a bomb":                       {`{"entries":[{"name":"f","type":"reg","size":1000000000,"digest":"` + zeros + `"}]}`, berm.Unsupported, `"f"`},
		"an inner bomb":                {chunk(`"innerOffset":9223372036854775807}`), berm.Unsupported, `"f"`},
		"too many":                     {`{"entries":[` + strings.Repeat(`{"name":"d","type":"dir"},`, maxRecords) + `{"name":"d","type":"dir"}]}`, berm.Unsupported, "more than"},
		"a digest that is not its own": {chunk(`"chunkSize":5,"digest":"` + zeros + `"},{"type":"chunk","offset":7,"chunkOffset":5}`), berm.Unsupported, `"f"`},
	} {
		_, err := parseTOC([]byte(c.table), 1000)
		if err == nil || berm.KindOf(err) != c.kind || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got %v, want %v with %s", name, err, c.kind, c.says)
		}
	}
}

// A table is believed only if it is the one that the image names.
func TestTableOfAnother(t *testing.T) {
	blob, table := pack(t, "content")
	if _, err := ReadTOC(bytes.NewReader(blob), int64(len(blob)), table); err != nil {
		t.Errorf("its own: %v", err)
	}
	for name, c := range map[string]struct {
		blob  []byte
		table string
		kind  berm.Kind
	}{
		"another digest": {blob, zeros, berm.Invalid},
		"no digest":      {blob, "md5:1", berm.Invalid},
		"no footer":      {blob[:len(blob)-1], table, berm.Unsupported},
		"too short":      {blob[:20], table, berm.Unsupported},
		"table outside":  {append([]byte("x"), blob[len(blob)-estargz.FooterSize:]...), table, berm.Invalid},
	} {
		if _, err := ReadTOC(bytes.NewReader(c.blob), int64(len(c.blob)), c.table); berm.KindOf(err) != c.kind {
			t.Errorf("%s: %v, want %v", name, err, c.kind)
		}
	}
}

// pack makes a layer with one file, f, of several chunks.
func pack(t testing.TB, content string) (blob []byte, table string) {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "f", Size: int64(len(content))}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	b, err := estargz.Build(io.NewSectionReader(bytes.NewReader(out.Bytes()), 0, int64(out.Len())), estargz.WithChunkSize(4))
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if blob, err = io.ReadAll(b); err != nil {
		t.Fatal(err)
	}
	return blob, b.TOCDigest().String()
}

// What a chunk unpacks to is what its digest says, or an error.
func TestChunkOfAnother(t *testing.T) {
	blob, table := pack(t, "0123456789")
	entries, err := ReadTOC(bytes.NewReader(blob), int64(len(blob)), table)
	if err != nil {
		t.Fatal(err)
	}
	got := ""
	for _, c := range entries[len(entries)-1].Chunks {
		part, err := unpack(bytes.NewReader(blob[c.From:c.To]), c)
		if err != nil {
			t.Fatal(err)
		}
		got += string(part)
		if _, err := unpack(bytes.NewReader(make([]byte, c.To-c.From)), c); err == nil {
			t.Error("zeros were taken for a chunk")
		}
		c.Digest = sha256.Sum256([]byte("other"))
		if _, err := unpack(bytes.NewReader(blob[c.From:c.To]), c); err == nil {
			t.Error("another chunk was taken")
		}
	}
	if got != "0123456789" {
		t.Errorf("got %q", got)
	}
}

func FuzzTable(f *testing.F) {
	f.Add([]byte(`{"version":1,"entries":[{"name":"d/","type":"dir","mode":493},{"name":"d/f","type":"reg","size":10,"chunkSize":5,"chunkDigest":"` + zeros + `"},{"name":"d/f","type":"chunk","offset":20,"chunkOffset":5,"chunkDigest":"` + zeros + `"}]}`))
	f.Add([]byte(`{"entries":[{"name":"../f","type":"hardlink","linkName":"../../f"},{"name":"/x","type":"symlink","xattrs":{"user.k":"dg=="}}]}`))
	f.Fuzz(func(t *testing.T, table []byte) {
		const end = 1 << 20
		entries, err := parseTOC(table, end)
		if err != nil {
			return
		}
		for _, e := range entries {
			at := int64(0)
			for _, c := range e.Chunks {
				if c.At != at || c.Size <= 0 || c.Size > maxChunk || c.From < 0 || c.To <= c.From || c.To > end || c.Inner < 0 {
					t.Fatalf("%q has the chunk %+v", e.Header.Name, c)
				}
				at += c.Size
			}
			if e.Header.Typeflag == tar.TypeReg && at != e.Header.Size {
				t.Fatalf("%q has chunks for %d of %d bytes", e.Header.Name, at, e.Header.Size)
			}
		}
	})
}

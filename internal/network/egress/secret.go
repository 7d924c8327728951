package egress

import (
	"encoding/binary"
	"io"
	"maps"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// maxSecrets bounds all secrets of a sandbox together in bytes.
const maxSecrets = 4 << 20

// MemoryFile makes a file in memory that nobody can change any more.
func MemoryFile(data []byte) (*os.File, error) {
	failed := func(err error) (*os.File, error) {
		return nil, berm.Errorf(berm.Internal, "make a file in memory: %w", err)
	}
	fd, err := unix.MemfdCreate("berm", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return failed(err)
	}
	file := os.NewFile(uintptr(fd), "memory")
	if _, err = file.Write(data); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	}
	if err != nil {
		file.Close()
		return failed(err)
	}
	return file, nil
}

// ReadMemory reads a file that MemoryFile made, from its beginning, and closes it.
func ReadMemory(file *os.File, most int64) ([]byte, error) {
	defer file.Close()
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Size() > most {
		return nil, berm.Errorf(berm.Invalid, "what came is no file in memory, or a large one")
	}
	data := make([]byte, info.Size())
	if _, err := io.ReadFull(io.NewSectionReader(file, 0, info.Size()), data); err != nil {
		return nil, berm.Errorf(berm.Internal, "read a file in memory: %w", err)
	}
	return data, nil
}

// secrets are those of a credential, in a fixed order.
func (c *Credential) secrets() []*[]byte {
	all := []*[]byte{&c.Value, &c.Field}
	if c.Values == nil && len(c.Wants) > 0 {
		c.Values = map[string][]byte{}
	}
	for _, name := range c.Wants {
		value := c.Values[name]
		all = append(all, &value)
	}
	return all
}

// packSecrets puts the secrets of credentials into a file: in a message they would be copied
// to places that nobody wipes.
func packSecrets(credentials []Credential) (*os.File, error) {
	var data []byte
	defer func() { clear(data[:cap(data)]) }()
	size := 0
	for i := range credentials {
		c := &credentials[i]
		c.Wants = slices.Sorted(maps.Keys(c.Values))
		for _, secret := range c.secrets() {
			size += 4 + len(*secret)
		}
	}
	if size > maxSecrets {
		return nil, berm.Errorf(berm.Invalid, "the secrets of a sandbox have more than 4 MiB together")
	}
	data = make([]byte, 0, size)
	for i := range credentials {
		for _, secret := range credentials[i].secrets() {
			data = binary.BigEndian.AppendUint32(data, uint32(len(*secret)))
			data = append(data, *secret...)
		}
	}
	return MemoryFile(data)
}

// Unpack gives credentials that came with an order the secrets in the file that came with it,
// which it closes.
func Unpack(credentials []Credential, file *os.File) error {
	invalid := berm.Errorf(berm.Invalid, "the secrets do not belong to the credentials")
	if file == nil {
		return invalid
	}
	data, err := ReadMemory(file, maxSecrets)
	if err != nil {
		return err
	}
	defer clear(data)
	rest := data
	for i := range credentials {
		c := &credentials[i]
		for j, to := range c.secrets() {
			if len(rest) < 4 || uint64(len(rest)-4) < uint64(binary.BigEndian.Uint32(rest)) {
				return invalid
			}
			n := int(binary.BigEndian.Uint32(rest))
			value := slices.Clone(rest[4 : 4+n])
			rest = rest[4+n:]
			if *to = value; j > 1 {
				c.Values[c.Wants[j-2]] = value
			}
		}
	}
	if len(rest) > 0 {
		return invalid
	}
	return nil
}

package e2b

import (
	"bytes"
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"sync"
)

// guarded are the fields of a create that decide what the sandbox may do and who may reach it.
// E2B's API ignores keys that it does not know, and so does this one; but what was meant to be
// one of these must not be ignored.
var guarded = []string{"allow_internet_access", "network", "secure", "berm"}

// checkCreate refuses a create, in JSON that was parsed before, in which a key looks like one
// that decides about the sandbox and is not, and unknown keys inside network and berm.
func checkCreate(body []byte) error {
	return eachKey(body, func(key string, value json.RawMessage) error {
		switch key {
		case "network":
			return checkKeys(value, key, network{})
		case "berm":
			return checkKeys(value, key, wishes{})
		}
		of := loose(key)
		for _, m := range meant() {
			if key != m.name && of == m.loose {
				return invalid("%.100q is not a field of a sandbox; did you mean %s?", key, m.name)
			}
		}
		return nil
	})
}

// meaning is what a key may be mistaken for.
type meaning struct{ name, loose string }

var meant = sync.OnceValue(func() (all []meaning) {
	for _, name := range guarded {
		all = append(all, meaning{name, loose(name)})
	}
	for _, name := range keysOf(reflect.TypeFor[network]()) {
		all = append(all, meaning{"network." + name, loose(name)})
	}
	return all
})

var separators = strings.NewReplacer("_", "", "-", "")

// loose is a key without what people mistake in keys.
func loose(key string) string {
	return strings.ToLower(separators.Replace(key))
}

// checkKeys refuses JSON, which was parsed before, with a key that the type of v has not, in
// the same letters. path is where it is, "" at the top.
func checkKeys(body json.RawMessage, path string, v any) error {
	return checkKeysOf(body, path, reflect.TypeOf(v))
}

func checkKeysOf(body json.RawMessage, path string, t reflect.Type) error {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch t.Kind() {
	case reflect.Struct:
		known := keysOf(t)
		return eachKey(body, func(key string, value json.RawMessage) error {
			at := key
			if path != "" {
				at = path + "." + key
			}
			i := slices.Index(known, key)
			if i < 0 {
				return invalid("%.200q is not a field; known here: %s", at, strings.Join(known, ", "))
			}
			return checkKeysOf(value, at, fieldsOfJSON(t)[i].Type)
		})
	case reflect.Map:
		return eachKey(body, func(key string, value json.RawMessage) error {
			return checkKeysOf(value, path+"."+key, t.Elem())
		})
	case reflect.Slice:
		if t == reflect.TypeFor[json.RawMessage]() {
			return nil // judged by who reads it
		}
		var list []json.RawMessage
		_ = json.Unmarshal(body, &list) // it was parsed before
		for _, value := range list {
			if err := checkKeysOf(value, path, t.Elem()); err != nil {
				return err
			}
		}
	}
	return nil
}

// eachKey calls do for the keys of an object in JSON, which was parsed before, also for those
// that are there twice. What is no object has none.
func eachKey(body json.RawMessage, do func(key string, value json.RawMessage) error) error {
	d := json.NewDecoder(bytes.NewReader(body))
	if start, err := d.Token(); err != nil || start != json.Delim('{') {
		return nil //nolint:nilerr // it was parsed before
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return invalid("%s", err)
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return invalid("%s", err)
		}
		if err := do(key.(string), value); err != nil {
			return err
		}
	}
	return nil
}

// fieldsOfJSON are the fields of a struct that JSON has, those of embedded structs among them.
func fieldsOfJSON(t reflect.Type) []reflect.StructField {
	return slices.DeleteFunc(reflect.VisibleFields(t), func(f reflect.StructField) bool { return f.Anonymous })
}

func keysOf(t reflect.Type) []string {
	var keys []string
	for _, f := range fieldsOfJSON(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		keys = append(keys, name)
	}
	return keys
}

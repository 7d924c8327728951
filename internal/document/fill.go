package document

import (
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/berm-sandbox/berm"
)

// Fill reads a node into what to points to: texts, numbers, flags, structs by the names of their json
// tags, lists, maps of texts, nodes for a later Fill, and whatever is a yaml.Unmarshaler. Keys that are not known, or that
// stand twice, are errors. Single values replace what is there; lists and maps add to it. What names
// the node in errors. Kind: Invalid.
func (s Source) Fill(node *yaml.Node, what string, to any) error {
	return s.fill(node, what, reflect.ValueOf(to).Elem())
}

func (s Source) fill(node *yaml.Node, what string, v reflect.Value) error {
	if n, ok := v.Addr().Interface().(*yaml.Node); ok { // for later
		*n = *node
		return nil
	}
	if own, ok := v.Addr().Interface().(yaml.Unmarshaler); ok {
		if err := own.UnmarshalYAML(node); err != nil {
			return s.Errorf(node, "%s: %w", what, err)
		}
		return nil
	}
	switch v.Kind() {
	case reflect.Pointer:
		fresh := reflect.New(v.Type().Elem())
		if err := s.fill(node, what, fresh.Elem()); err != nil {
			return err
		}
		v.Set(fresh)
		return nil
	case reflect.Struct:
		return s.mapping(node, what, Keys(v.Interface()), func(_, value *yaml.Node, i int) error {
			name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
			return s.fill(value, name, v.Field(i))
		})
	case reflect.Map:
		if v.IsNil() {
			v.Set(reflect.MakeMap(v.Type()))
		}
		return s.mapping(node, what, nil, func(key, value *yaml.Node, _ int) error {
			e := reflect.New(v.Type().Elem()).Elem()
			if err := s.fill(value, key.Value, e); err != nil {
				return err
			}
			v.SetMapIndex(reflect.ValueOf(key.Value), e)
			return nil
		})
	case reflect.Slice:
		if node.Kind != yaml.SequenceNode {
			return s.Errorf(node, "%s must be a list", what)
		}
		// What others hold of the list stays as it is.
		v.Set(v.Slice3(0, v.Len(), v.Len()))
		for _, item := range node.Content {
			e := reflect.New(v.Type().Elem()).Elem()
			if err := s.fill(item, "an entry of "+what, e); err != nil {
				return err
			}
			v.Set(reflect.Append(v, e))
		}
		return nil
	}
	return s.single(node, what, v)
}

// single reads a value without others in it.
func (s Source) single(node *yaml.Node, what string, v reflect.Value) error {
	switch {
	case node.Kind != yaml.ScalarNode:
		return s.Errorf(node, "%s must be a single value", what)
	case node.ShortTag() == "!!null":
		return s.Errorf(node, "the value of %s is missing", what)
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(node.Value)
	case reflect.Bool:
		if node.Value != "true" && node.Value != "false" { // as YAML 1.2 and JSON have it: yes and on are words
			return s.Errorf(node, "%s must be true or false", what)
		}
		v.SetBool(node.Value == "true")
	case reflect.Int, reflect.Int64:
		n, err := strconv.ParseInt(node.Value, 10, v.Type().Bits())
		if err != nil {
			return s.Errorf(node, "%s must be a whole number", what)
		}
		v.SetInt(n)
	case reflect.Float64:
		f, err := strconv.ParseFloat(node.Value, 64)
		if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
			return s.Errorf(node, "%s must be a number", what)
		}
		v.SetFloat(f)
	default:
		return berm.Errorf(berm.Internal, "nothing of type %s can be read", v.Type())
	}
	return nil
}

// mapping calls set with each key and value, and the key's place in known. Without known keys all are.
func (s Source) mapping(node *yaml.Node, what string, known []string, set func(key, value *yaml.Node, i int) error) error {
	if node.Kind != yaml.MappingNode {
		return s.Errorf(node, "%s must be a mapping of keys to values", what)
	}
	seen := make(map[string]bool, len(node.Content)/2)
	for n := 0; n < len(node.Content); n += 2 {
		key, value := node.Content[n], node.Content[n+1]
		i := slices.Index(known, key.Value)
		switch {
		case key.Kind != yaml.ScalarNode || known != nil && (i < 0 || key.Value == ""):
			sorted := slices.DeleteFunc(slices.Sorted(slices.Values(known)), func(k string) bool { return k == "" })
			return s.Errorf(key, "unknown key %q in %s", clip(key.Value), what).WithHint("known are %s", strings.Join(sorted, ", "))
		case seen[key.Value]:
			return s.Errorf(key, "%q stands here a second time", clip(key.Value))
		}
		seen[key.Value] = true
		if err := set(key, value, i); err != nil {
			return err
		}
	}
	return nil
}

// Keys are the names that Fill knows of a struct's fields, in their order; "" for a field that it
// does not.
func Keys(of any) []string {
	t := reflect.TypeOf(of)
	keys := make([]string, t.NumField())
	for i := range keys {
		if name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ","); name != "-" {
			keys[i] = name
		}
	}
	return keys
}

package cleanup

import (
	"slices"
	"testing"
)

func TestCleanRunsLastFirstAndOnce(t *testing.T) {
	var ran []int
	cu := Make(func() { ran = append(ran, 1) })
	cu.Add(func() { ran = append(ran, 2) })
	cu.Clean()
	cu.Clean()
	if !slices.Equal(ran, []int{2, 1}) {
		t.Errorf("ran %v", ran)
	}
}

func TestReleaseHandsTheDutyOver(t *testing.T) {
	ran := 0
	cu := Make(func() { ran++ })
	undo := cu.Release()
	cu.Clean()
	if ran != 0 {
		t.Fatal("Clean after Release ran the undo")
	}
	undo()
	if ran != 1 {
		t.Fatal("the released undo did not run")
	}
}

// Command cart says whether its two numbers are the same.
package main

import (
	"fmt"
	"os"
	"strconv"

	"example.org/cart"
)

func main() {
	a, _ := strconv.Atoi(os.Args[1])
	b, _ := strconv.Atoi(os.Args[2])
	fmt.Println(cart.Same([]int{a}, []int{b}))
}

#include <stdio.h>

#include "total.h"

int main(int argc, char **argv) {
	printf("%d\n", total(argc - 1, argv + 1));
	return 0;
}

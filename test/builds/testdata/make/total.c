#include <stdlib.h>

#include "total.h"

int total(int n, char **numbers) {
	int sum = 0;
	for (int i = 0; i < n; i++)
		sum += atoi(numbers[i]);
	return sum;
}

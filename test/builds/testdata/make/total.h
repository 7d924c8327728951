int total(int n, char **numbers);

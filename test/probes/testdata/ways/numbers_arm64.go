package main

const memfdCreate, execveat = 279, 281

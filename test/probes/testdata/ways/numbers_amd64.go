package main

const memfdCreate, execveat = 319, 322

package seccomp

const arch = "arm64"

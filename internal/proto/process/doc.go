// Package process holds the messages of the guest agent's process service, generated from proto/process.
package process

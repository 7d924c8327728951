// Package filesystem holds the messages of the guest agent's file system service, generated from proto/filesystem.
package filesystem

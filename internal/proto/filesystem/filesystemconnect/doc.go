// Package filesystemconnect is the client and the server of the guest agent's file system service, generated from proto/filesystem.
package filesystemconnect

// Package processconnect is the client and the server of the guest agent's process service, generated from proto/process.
package processconnect

"""Put before every probe of kind py that needs an internet. What answers there says so."""

import os
import socket
import ssl
import struct
import subprocess
import time

EVIL = os.environ["EVIL_IP"]


def show(*words):
    print(*(repr(w) if isinstance(w, (bytes, str)) and not str(w).isascii() else w for w in words), flush=True)


def read(s, limit=4096):
    data = b""
    try:
        while len(data) < limit:
            more = s.recv(4096)
            if not more:
                break
            data += more
    except OSError:
        pass
    return data


def outcome(what, data):
    """Prints GOT when the internet answered what it must not have been asked."""
    first = data.split(b"\r\n")[0][:60].decode("latin1").encode("unicode_escape").decode()
    print("GOT" if b"X-Internet" in data else "no", what, first, flush=True)


def request(host, path="/", method="GET", fields=""):
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{fields}\r\n".encode("latin1")


def tcp(host, port, send=b"", timeout=2):
    """Connects, sends and reads; an error is its name."""
    try:
        with socket.create_connection((host, port), timeout) as s:
            if send:
                s.sendall(send)
            return read(s)
    except (OSError, UnicodeError) as e:
        return type(e).__name__.encode()


def context():
    c = ssl.create_default_context()
    c.check_hostname, c.verify_mode = False, ssl.CERT_NONE
    return c


def tls(host, send, sni=None, port=443, timeout=3, alpn=()):
    """The same by TLS, whatever the certificate."""
    try:
        c = context()
        if alpn:
            c.set_alpn_protocols(alpn)
        with socket.create_connection((host, port), timeout) as s:
            with c.wrap_socket(s, server_hostname=host if sni is None else sni or None) as t:
                t.sendall(send)
                return read(t)
    except (OSError, UnicodeError, ValueError) as e:
        return f"{type(e).__name__} {getattr(e, 'reason', None) or ''}".encode()


def web(url, *args):
    """Asks curl; the reply with its head."""
    done = subprocess.run(["curl", "-sSi", "-g", "-m", "4", *args, url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    return done.stdout


def labels(name):
    return b"".join(bytes([len(l)]) + l for l in name.encode("latin1").split(b".") if l) + b"\0"


def query(qname, kind=1, server="10.0.2.2", over="udp", timeout=1):
    """Sends a DNS query, qname being bytes of the wire; returns (code or None, answers)."""
    message = struct.pack(">6H", os.getpid() & 0xFFFF, 0x100, 1, 0, 0, 0) + qname + struct.pack(">2H", kind, 1)
    try:
        if over == "udp":
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                s.settimeout(timeout)
                s.sendto(message, (server, 53))
                reply = s.recv(4096)
        else:
            with socket.create_connection((server, 53), timeout) as s:
                s.sendall(struct.pack(">H", len(message)) + message)
                reply = read(s, 14)[2:]
    except OSError:
        return None, 0
    if len(reply) < 12:
        return None, 0
    return reply[3] & 15, struct.unpack(">H", reply[6:8])[0]

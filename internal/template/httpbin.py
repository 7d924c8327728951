"""Tells of each request what came, in the form of httpbin: lists of values for each field."""
import http.server
import json
import sys
import urllib.parse


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        url = urllib.parse.urlsplit(self.path)
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status = 200
        if url.path.startswith("/status/") and url.path[8:].isdigit():
            status = int(url.path[8:])
        told = {"headers": {name: self.headers.get_all(name) for name in self.headers}}
        if url.path != "/headers":
            told |= {"method": self.command, "url": self.path, "args": urllib.parse.parse_qs(url.query), "data": data.decode("utf-8", "replace")}
        body = json.dumps(told).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = answer


http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Handler).serve_forever()

# Stands in for a code interpreter: speaks its protocol, with Python and one context alone.
import contextlib, io, json, sys, traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

variables, count = {}, 0


class Stream(io.TextIOBase):
    def __init__(self, send):
        self.send = send

    def write(self, text):
        self.send(type="stdout", text=text)
        return len(text)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(json.dumps([{"id": "default", "language": "python", "cwd": "/home/user"}]).encode())

    def reply(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        global count
        code = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["code"]
        self.send_response(200)
        self.end_headers()

        def send(**line):
            self.wfile.write(json.dumps(line).encode() + b"\n")
            self.wfile.flush()

        count += 1
        with contextlib.redirect_stdout(Stream(send)):
            try:
                try:
                    value = eval(code, variables)
                    send(type="result", text=repr(value), is_main_result=True, extra={})
                except SyntaxError:
                    exec(code, variables)
            except Exception as e:
                send(type="error", name=type(e).__name__, value=str(e), traceback=traceback.format_exc())
        send(type="number_of_executions", execution_count=count)
        send(type="end_of_execution")


ThreadingHTTPServer(("127.0.0.1", 49999), Handler).serve_forever()

"""A Jupyter kernel that does what one line of its code says, for tests of the server.

    python3 fake_kernel.py CONNECTION_FILE
"""
import hashlib
import hmac
import json
import os
import signal
import sys
import time
import uuid
from datetime import datetime, timezone

import zmq

with open(sys.argv[1]) as f:
    where = json.load(f)
context = zmq.Context()


def pack(kind, content, parent):
    """A message in the form that goes over the wire, signed."""
    header = {"msg_id": uuid.uuid4().hex, "msg_type": kind, "session": "fake", "username": "fake",
              "date": datetime.now(timezone.utc).isoformat(), "version": "5.3"}
    parts = [json.dumps(part).encode() for part in (header, parent, {}, content)]
    digest = hmac.new(where["key"].encode(), b"".join(parts), hashlib.sha256).hexdigest()
    return [b"<IDS|MSG>", digest.encode(), *parts]


def bind(kind, name):
    socket = context.socket(kind)
    socket.bind(f"tcp://{where['ip']}:{where[name + '_port']}")
    return socket


iopub, shell, control = bind(zmq.PUB, "iopub"), bind(zmq.ROUTER, "shell"), bind(zmq.ROUTER, "control")
count = 0


def do(words, tell, reply):
    """Runs words[0] with the rest. Returns what of the end is not to be told."""
    name, rest = words[0], words[1:]
    if name == "print":
        tell("stream", {"name": "stdout", "text": " ".join(rest) + "\n"})
    elif name == "value":
        tell("execute_result", {"data": json.loads(" ".join(rest)), "metadata": {}, "execution_count": count})
    elif name == "display":
        tell("display_data", {"data": json.loads(" ".join(rest)), "metadata": {}})
    elif name == "odd":  # what no kernel publishes, and code can
        tell("stream", {})
        tell("display_data", {"data": 5})
    elif name == "env":
        tell("stream", {"name": "stdout", "text": os.environ.get(rest[0], "nothing")})
    elif name == "set":
        for variable, value in json.loads(" ".join(rest)).items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
    elif name == "cwd":
        tell("stream", {"name": "stdout", "text": os.getcwd()})
    elif name == "sleep":
        time.sleep(float(rest[0]))
    elif name == "spin":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            time.sleep(1)
    elif name == "flood":
        for _ in range(int(rest[0])):
            tell("stream", {"name": "stdout", "text": "x" * (1 << 20)})
            time.sleep(0.001)
    elif name == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "exit":
        os._exit(int(rest[0]))
    elif name == "mute":  # the reply comes, the end of what is published does not
        return "idle"
    elif name == "dumb":  # the end of what is published comes, the reply does not
        return "reply"
    elif name == "quit":  # as IPython's exit()
        reply["payload"] = [{"source": "ask_exit", "keepkernel": False}]
    else:
        raise ValueError("no such word: " + name)


while True:
    try:
        identity, _, _, header, _, _, content = shell.recv_multipart()
        header, content = json.loads(header), json.loads(content)
        asked = header["msg_type"]

        def tell(kind, content):
            iopub.send_multipart(pack(kind, content, header))

        tell("status", {"execution_state": "busy"})
        reply, mute = {"status": "ok"}, None
        if asked == "execute_request":
            if not content["silent"]:
                count += 1
                tell("execute_input", {"code": content["code"], "execution_count": count})
            try:
                for line in filter(None, content["code"].split("\n")):
                    mute = do(line.split(), tell, reply)
            except (Exception, KeyboardInterrupt) as e:
                reply = {"status": "error", "ename": type(e).__name__, "evalue": str(e), "traceback": ["one", "\x1b[1m\x1b[31mtwo\x1b[0m"]}
                tell("error", reply)
        if mute != "reply":
            shell.send_multipart([identity, *pack(asked.replace("request", "reply"), reply, header)])
        if mute != "idle":
            tell("status", {"execution_state": "idle"})
    except KeyboardInterrupt:
        pass  # it came between two requests

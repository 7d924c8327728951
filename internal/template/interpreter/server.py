"""The code interpreter of a sandbox: E2B's protocol on one port, over Jupyter kernels.

    python3 server.py [PORT]
"""
import asyncio
import errno
import json
import logging
import os
import re
import sys

import tornado.httpclient
import tornado.httpserver
import tornado.netutil
import tornado.web
from tornado.iostream import StreamClosedError

import languages
from context import Context, Execution, Refused
from kernel import Died, Unanswered

PORT = 49999
KEEPALIVE = 5  # seconds after which a silent stream says that it lives
HOME = "/home/user"

# What a client may send and have.
BODY_LIMIT = 64 << 20
CONTEXT_LIMIT = 64
ENV_LIMIT = 1000
VALUE_LIMIT = (128 << 10) - 1  # the kernel's, for one string of an environment
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

AGENT = "http://127.0.0.1:49983/envs"
END = b'{"type":"end_of_execution"}\n'
ALIVE = b'{"type":"keepalive"}\n'


class Interpreter:
    """The contexts of the sandbox."""

    def __init__(self, home=HOME, agent=AGENT):
        self.home, self._agent = home, agent
        self.contexts = {}
        self._default = {}
        self._http = tornado.httpclient.AsyncHTTPClient(force_instance=True)

    async def begin(self):
        """Makes the contexts that are there from the start. Python's kernel is warm."""
        for name in ("python", "javascript"):
            self.default(name)
        await self._default["python"].warm()

    def default(self, name):
        """The context for calls that name a language alone, made when it is first asked for."""
        context = self._default.get(name)
        if context is None:
            context = self._default[name] = self._add(name, self.home, {})
        return context

    async def create(self, name, cwd, env):
        """A context of its own, whose kernel runs when it is returned."""
        if len(self.contexts) >= CONTEXT_LIMIT:
            raise Refused(429, f"there are {CONTEXT_LIMIT} contexts already: remove one")
        if not (os.path.isdir(cwd) and os.access(cwd, os.X_OK)):
            raise Refused(400, f"there is no directory {cwd} that code may enter")
        context = self._add(name, cwd, env)
        try:
            await context.start()
        except (Died, Unanswered) as e:
            await self.remove(context.id)
            raise Refused(500, f"the kernel of {name} does not start: {e}") from e
        return context

    def _add(self, name, cwd, env):
        language = languages.ALL.get(name)
        if language is None or not language.installed():
            known = ", ".join(n for n, l in languages.ALL.items() if l.installed())
            raise Refused(400, f"there is no kernel for {name[:100]}; there are {known}")
        context = Context(name, language, cwd, env, self._sandbox_env)
        self.contexts[context.id] = context
        return context

    def find(self, context_id):
        context = self.contexts.get(context_id)
        if context is None:
            raise Refused(404, f"Context {context_id[:100]} not found")
        return context

    async def remove(self, context_id):
        context = self.find(context_id)
        del self.contexts[context_id]
        for name, other in list(self._default.items()):
            if other is context:
                del self._default[name]
        await context.close()

    async def _sandbox_env(self, token):
        """The variables that the sandbox was made with, from the guest agent. None if it does
        not tell the holder of this token."""
        headers = {"X-Access-Token": token} if token else {}
        try:
            answer = await self._http.fetch(self._agent, headers=headers, request_timeout=5)
            return {k: v for k, v in json.loads(answer.body).items() if NAME.match(k)}
        except (OSError, ValueError, tornado.httpclient.HTTPClientError) as e:
            logging.warning("the guest agent does not tell the environment: %s", e)
            return None


class Handler(tornado.web.RequestHandler):
    """What all routes share: plain texts for errors, and pages of any origin may call."""

    def initialize(self, interpreter):
        self.interpreter = interpreter

    def set_default_headers(self):
        self.set_header("Access-Control-Allow-Origin", "*")
        self.set_header("Access-Control-Allow-Methods", "*")
        self.set_header("Access-Control-Allow-Headers", "*")

    def options(self, *_):
        self.set_status(204)

    def log_exception(self, kind, value, traceback):
        if kind is not Refused:
            super().log_exception(kind, value, traceback)

    def write_error(self, status, exc_info=None, **_):
        error = exc_info[1] if exc_info else None
        if isinstance(error, Refused):
            self.set_status(error.code)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(str(error) if isinstance(error, (Refused, tornado.web.HTTPError)) else f"the interpreter failed: {error}")

    def body(self, **kinds):
        """The fields of the body, each None or of its type. Those that are not known are ignored."""
        try:
            body = json.loads(self.request.body or b"{}")
        except (ValueError, RecursionError) as e:
            raise Refused(400, f"the body is not JSON: {e}") from e
        if not isinstance(body, dict):
            raise Refused(400, "the body is not an object")
        fields = []
        for name, kind in kinds.items():
            value = body.get(name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise Refused(422, f"{name} has the wrong type")
            fields.append(value)
        return fields

    def answer(self, value):
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(value))


def environment(values):
    """Checks variables that a client sets."""
    values = values or {}
    if len(values) > ENV_LIMIT:
        raise Refused(400, f"more than {ENV_LIMIT} environment variables")
    for name, value in values.items():
        if not NAME.match(name):
            raise Refused(400, f"{name[:100]!r} is no name of an environment variable")
        if not isinstance(value, str) or "\0" in value or len(value) > VALUE_LIMIT:
            raise Refused(400, f"the value of {name} is no text of at most {VALUE_LIMIT} characters")
    return values


class Health(Handler):
    def get(self):
        self.answer("OK")


class Contexts(Handler):
    def get(self):
        self.answer([context.describe() for context in self.interpreter.contexts.values()])

    async def post(self):
        language, cwd, env = self.body(language=str, cwd=str, env_vars=dict)
        context = await self.interpreter.create(
            languages.normal(language or "python"), cwd or self.interpreter.home, environment(env)
        )
        self.answer(context.describe())


class OneContext(Handler):
    async def delete(self, context_id):
        await self.interpreter.remove(context_id)
        self.answer(None)


class Restart(Handler):
    async def post(self, context_id):
        try:
            await self.interpreter.find(context_id).restart()
        except (Died, Unanswered) as e:
            raise Refused(500, f"the kernel does not start: {e}") from e
        self.answer(None)


class Execute(Handler):
    execution = None

    async def post(self):
        code, context_id, language, env, timeout = self.body(
            code=str, context_id=str, language=str, env_vars=dict, timeout=(int, float)
        )
        if code is None:
            raise Refused(422, "there is no code")
        if context_id and language:
            raise Refused(400, "Only one of context_id or language can be provided")
        if timeout is not None and not timeout > 0:
            timeout = None
        execution = Execution(code, environment(env), self.request.headers.get("X-Access-Token"), timeout)
        if context_id:
            context = self.interpreter.find(context_id)
        else:
            context = self.interpreter.default(languages.normal(language or "python"))
        context.submit(execution)
        self.execution = execution
        self.set_header("Content-Type", "application/x-ndjson")
        self.set_header("X-Accel-Buffering", "no")
        try:
            await self.flush()  # the client is to know that it was taken
            next_lines = asyncio.ensure_future(execution.next())
            while True:
                await asyncio.wait({next_lines}, timeout=KEEPALIVE)
                if not next_lines.done():
                    self.write(ALIVE)
                elif lines := next_lines.result():
                    self.write(lines)
                    next_lines = asyncio.ensure_future(execution.next())
                else:
                    break
                await self.flush()
            self.finish(END)
        except StreamClosedError:
            execution.stopped.set()

    def on_connection_close(self):
        if self.execution is not None:
            self.execution.stopped.set()


def application(interpreter):
    """The routes of E2B's protocol."""
    shared = {"interpreter": interpreter}
    return tornado.web.Application([
        (r"/health", Health, shared),
        (r"/execute", Execute, shared),
        (r"/contexts", Contexts, shared),
        (r"/contexts/([^/]+)", OneContext, shared),
        (r"/contexts/([^/]+)/restart", Restart, shared),
    ], log_function=lambda handler: None)


async def take_port(port):
    """Listens, once nobody else does. Who asks from now on waits for the answer."""
    while True:
        try:
            # Whoever asks, asks from inside, or through the sandbox's router, which dials from inside.
            return tornado.netutil.bind_sockets(port, "127.0.0.1")
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
        await asyncio.sleep(1)  # another server, whose supervisor was killed, goes on


async def main():
    logging.basicConfig(level=logging.WARNING)
    sockets = await take_port(int(sys.argv[1]) if len(sys.argv) > 1 else PORT)
    interpreter = Interpreter()
    await interpreter.begin()
    server = tornado.httpserver.HTTPServer(application(interpreter), max_buffer_size=BODY_LIMIT, max_body_size=BODY_LIMIT)
    server.add_sockets(sockets)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())

"""A context: a kernel with a name, the executions that wait for it, and what became of them."""
import asyncio
import datetime
import json
import logging
import os
import re
import uuid

from kernel import OUTPUT_LIMIT, Died, Kernel, Unanswered

INTERRUPT_GRACE = 10  # seconds that interrupted code has to stop, before its kernel is killed
QUEUE_LIMIT = 100  # executions that wait for one context
COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # not every kernel can be told to leave it out

# The fields of a result, by MIME type. Everything else is told under `extra`.
FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}

VALUES = ("json", "data", "chart")  # fields that are no texts


class Refused(Exception):
    """What a client asked for is refused; code is the HTTP status."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


def result(content, main):
    """The event of a result."""
    event = {"type": "result", "is_main_result": main, "extra": {}}
    for kind, value in content["data"].items():
        if value is None:
            continue
        field = FIELDS.get(kind)
        if field is None:
            event["extra"][kind] = value
        elif field in VALUES or isinstance(value, str):
            event[field] = value
        else:  # clients take texts alone; Jupyter has lists of lines for them too
            event[field] = "".join(map(str, value)) if isinstance(value, list) else str(value)
    text = event.get("text")
    if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        event["text"] = text[1:-1]
    return event


def failure(name, value, traceback=""):
    """The event of an error."""
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


class Execution:
    """One call: code in, events out. Its sink is a kernel's, its events are a client's."""

    def __init__(self, code, env=None, token=None, timeout=None):
        self.code, self.env, self.token, self.timeout = code, env or {}, token, timeout
        self.events = asyncio.Queue()  # encoded lines; None ends them
        self.stopped = asyncio.Event()  # the client is gone, or too much waits for it
        self.waiting = 0  # bytes in events
        self.failed = False
        self.exits = False  # the code told its kernel to end

    def put(self, event):
        line = json.dumps(event, separators=(",", ":"), default=str).encode() + b"\n"
        if self.waiting + len(line) > OUTPUT_LIMIT and self.waiting:
            if not self.stopped.is_set():
                self.stopped.set()
                self._append(json.dumps(failure(
                    "OutputLimitExceeded", f"more than {OUTPUT_LIMIT >> 20} MiB of output wait for the client; the code was interrupted"
                )).encode() + b"\n")
                self.failed = True
            return
        self._append(line)

    def _append(self, line):
        self.waiting += len(line)
        self.events.put_nowait(line)

    async def next(self):
        """The next lines, as many as there are; None at the end."""
        lines = [await self.events.get()]
        while lines[-1] is not None and not self.events.empty():
            lines.append(self.events.get_nowait())
        if lines[-1] is None:
            self.events.put_nowait(None)
            lines.pop()
        data = b"".join(lines)
        self.waiting -= len(data)
        return data or None

    def end(self, error=None):
        if error is not None and not self.failed:
            self.failed = True
            self.put(error)
        self.events.put_nowait(None)

    def take(self, message):
        """Takes a message of the kernel."""
        kind, content = message["msg_type"], message["content"]
        if kind == "execute_reply":
            self.exits = any(p["source"] == "ask_exit" and not p.get("keepkernel") for p in content.get("payload") or [])
        if kind == "stream":
            self.put({"type": content["name"], "text": content["text"], "timestamp": _stamp(message)})
        elif kind in ("display_data", "update_display_data"):
            self.put(result(content, False))
        elif kind == "execute_result":
            self.put(result(content, True))
        elif kind == "execute_input":
            self.put({"type": "number_of_executions", "execution_count": content["execution_count"]})
        elif kind == "error" or kind == "execute_reply" and content["status"] == "error":
            if not self.failed:  # kernels tell errors on both channels
                self.failed = True
                self.put(failure(
                    content.get("ename", ""), content.get("evalue", ""), COLOUR.sub("", "\n".join(content.get("traceback") or []))
                ))


def _stamp(message):
    """When the kernel sent a message, in ISO 8601."""
    date = message["header"].get("date")
    return date.isoformat() if isinstance(date, datetime.datetime) else date


class _Quiet:
    """Takes what is run beside the client's code; errors of that go to the log."""

    def take(self, message):
        if message["msg_type"] == "error":
            logging.warning("setting up: %s: %s", message["content"]["ename"], message["content"]["evalue"])


class Context:
    """A context. Its executions run one after the other; its kernel starts when it is needed."""

    def __init__(self, name, language, cwd, env, sandbox_env):
        self.id = str(uuid.uuid4())
        self.name, self.language, self.cwd = name, language, cwd
        self._env = env
        self._sandbox_env = sandbox_env  # asks for the sandbox's variables, with the token of a call; None when refused
        self._known_env = {}  # the variables that the kernel has while no call sets others
        self._prepared = self._asked = False  # whether the kernel has had what it is to have once
        self._kernel = None
        self._lost = None  # why the last kernel went between two calls
        self._starting = asyncio.Lock()
        self._queue = asyncio.Queue()
        self._current = None
        self._closed = None  # why nothing runs any more
        self._worker = asyncio.create_task(self._work())

    def describe(self):
        return {"id": self.id, "language": self.name, "cwd": self.cwd}

    def submit(self, execution):
        """Takes an execution, which runs after those that came before."""
        if self._closed:
            raise Refused(404, f"Context {self.id} not found")
        if self._queue.qsize() >= QUEUE_LIMIT:
            raise Refused(429, f"{QUEUE_LIMIT} executions wait for context {self.id} already")
        self._queue.put_nowait(execution)

    async def start(self):
        """Has the kernel running. Died and Unanswered say why it is not."""
        async with self._starting:
            if self._closed:
                raise Died(self._closed)
            if self._kernel is not None and not self._kernel.died.done():
                return self._kernel
            if self._kernel is not None:
                self._lost = self._kernel.how()
                await self._kernel.stop()
                self._kernel = None
            kernel = Kernel(self.language)
            self._prepared = self._asked = False
            await kernel.start(self.cwd, os.environ | self._env)
            self._kernel = kernel
            return kernel

    async def restart(self):
        """Starts anew, without what was defined. What runs ends with an error."""
        if self._current is not None:
            self._current.restarted = True
        await self._stop_kernel()
        self._lost = None
        await self.start()

    async def close(self):
        """Ends the context. What runs or waits ends with an error."""
        self._closed = "the context was removed"
        await self._stop_kernel()
        self._queue.put_nowait(None)
        await self._worker

    async def _stop_kernel(self):
        async with self._starting:
            kernel, self._kernel = self._kernel, None
            if kernel is not None:
                await kernel.stop()

    async def _work(self):
        while (execution := await self._queue.get()) is not None:
            self._current = execution
            execution.restarted = False
            error = None
            try:
                if self._closed:
                    error = failure("ContextRemoved", self._closed)
                elif not execution.stopped.is_set():
                    error = await self._run(execution)
            except Exception as e:  # one call may fail, the context goes on
                logging.exception("an execution failed")
                error = failure("UnexpectedEndOfExecution", f"the interpreter failed: {e}")
            self._current = None
            execution.end(error)

    async def _run(self, execution):
        """Runs one execution and returns the event of an error that is not the code's own."""
        try:
            kernel = await self.start()
            if self._lost:
                execution.put({
                    "type": "stderr",
                    "text": f"[the context started anew, without its variables: {self._lost}]\n",
                    "timestamp": datetime.datetime.now(datetime.timezone.utc).isoformat(),
                })
                self._lost = None
            await self._prepare(kernel, execution)
            await self._supervise(kernel, execution)
            if execution.exits:  # it does a moment after its reply, and would take what runs next with it
                self._lost = "its code ended it"
                await self._renew()
            if execution.env and not kernel.died.done():
                before = {k: self._known_env.get(k, os.environ.get(k)) for k in execution.env}
                await kernel.execute(self.language.set_env(before), _Quiet(), silent=True)
            return None
        except Unanswered as e:
            return failure("UnexpectedEndOfExecution", str(e))
        except Died as e:
            if self._closed:
                return failure("ContextRemoved", self._closed)
            if execution.restarted:
                return failure("ContextRestarting", "the context was restarted")
            await self._renew()
            return failure("ContextRestarting", f"the kernel died: {e}; the context starts anew, without its variables")

    async def _renew(self):
        """Starts another kernel beside whatever comes, so that the next call is quick."""
        await self._stop_kernel()

        async def start():
            try:
                await self.start()
            except (Died, Unanswered) as e:
                logging.warning("no kernel: %s", e)

        self._renewing = asyncio.create_task(start())

    async def warm(self):
        """Has the kernel running, and with it what its first execution alone would wait for."""
        kernel = await self.start()
        await kernel.execute("", _Quiet(), silent=True)
        await self._sandbox_env(None)

    async def _prepare(self, kernel, execution):
        """Sets the variables that the code is to see."""
        codes, env = [], {}
        if not self._prepared:
            codes.append(self.language.prepare())
            self._prepared = True
        if not self._asked:
            sandbox = await self._sandbox_env(execution.token)
            self._asked = sandbox is not None
            self._known_env = env = (sandbox or {}) | self._env
        if env or execution.env:
            codes.append(self.language.set_env(env | execution.env))
        if code := "\n".join(filter(None, codes)):  # each message takes its time
            await kernel.execute(code, _Quiet(), silent=True)

    async def _supervise(self, kernel, execution):
        """Runs the code itself; ends it when its client is gone or its time is over."""
        run = asyncio.create_task(kernel.execute(execution.code, execution))
        stopped = asyncio.create_task(execution.stopped.wait())
        await asyncio.wait({run, stopped}, timeout=execution.timeout, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not run.done():
            if not execution.stopped.is_set():
                execution.put(failure("ExecutionTimeout", f"the code did not end within {execution.timeout:g} s and was interrupted"))
                execution.failed = True
            await kernel.interrupt()
            await asyncio.wait({run}, timeout=INTERRUPT_GRACE)
            if not run.done():
                self._lost = "its code did not stop when it was interrupted"
                await self._renew()
                await asyncio.wait({run})
                run.exception()
                return
        run.result()

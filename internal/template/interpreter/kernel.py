"""One running Jupyter kernel."""
import asyncio
import logging
import os
import signal
import tempfile

from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.connect import write_connection_file

START_TIMEOUT = 60  # seconds until a kernel must answer
SETTLE_TIMEOUT = 10  # seconds for the last messages of an execution, which come on two channels
OUTPUT_LIMIT = 64 << 20  # bytes of output that wait for a client that does not read

# A kernel goes with the server, and when memory runs out the kernel goes, not the server.
LAUNCH = ["sh", "-c", 'echo 500 >/proc/self/oom_score_adj; exec setpriv --pdeathsig KILL -- "$@"', "kernel"]


# What a shell starts in the background ignores what interrupts kernels, and they would with it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Died(Exception):
    """The kernel's process ended. The text says how."""


class Unanswered(Exception):
    """The kernel lives and does not answer."""


class Kernel:
    """A kernel process, and the connection to it."""

    def __init__(self, language):
        self.language = language
        self._run = None  # the message id and the sink of what runs
        self._pumps = []

    async def start(self, cwd, env):
        """Starts the process and returns when it answers. Died or Unanswered say why it does not."""
        fd, self._file = tempfile.mkstemp(prefix="kernel-", suffix=".json")
        os.close(fd)
        write_connection_file(self._file)
        try:
            self.process = await asyncio.create_subprocess_exec(
                *LAUNCH,
                *self.language.command(self._file),
                cwd=cwd,
                env=env | self.language.env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as e:
            os.unlink(self._file)
            raise Died(str(e)) from e
        self.died = asyncio.ensure_future(self.process.wait())
        self._client = AsyncKernelClient()
        self._client.load_connection_file(self._file)
        self._client.start_channels(shell=True, iopub=True, stdin=False, hb=False, control=True)
        self._pumps = [
            asyncio.create_task(self._pump(self._client.iopub_channel)),
            asyncio.create_task(self._pump(self._client.shell_channel)),
        ]
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await self._greet()
        except TimeoutError:
            await self.stop()
            raise Unanswered(f"the kernel did not answer within {START_TIMEOUT} s") from None
        except BaseException:
            await self.stop()
            raise

    async def _greet(self):
        """Asks until an answer has come on both channels: what is published before the
        subscription has reached the kernel is lost."""
        while True:
            answered = _Answered()
            await self._ask("kernel_info_request", {}, answered)
            await asyncio.wait({answered.done, self.died}, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            self._run = None
            if self.died.done():
                raise Died(self.how())
            if answered.done.done():
                return

    async def _pump(self, channel):
        session = self._client.session
        while True:
            parts = await channel.socket.recv_multipart()
            try:
                message = session.deserialize(session.feed_identities(parts)[1])
                if self._run and message["parent_header"].get("msg_id") == self._run[0]:
                    self._run[1].take(message)
            except Exception as e:  # it is not signed, or code made it: code can send what it likes
                logging.warning("a message that is none: %r", e)
            await asyncio.sleep(0)  # what is there already is received without a turn of the loop

    async def _ask(self, kind, content, answered):
        """Sends a request, whose answers go to answered."""
        message = self._client.session.msg(kind, content)
        self._run = (message["header"]["msg_id"], answered)
        await self._send(self._client.shell_channel, message)

    async def _send(self, channel, message):
        # Not by the channel's send: it goes past the loop, which then misses what comes meanwhile.
        await channel.socket.send_multipart(self._client.session.serialize(message))

    async def execute(self, code, sink, silent=False):
        """Runs code and returns when it has ended, having given its messages to sink.take. Died
        says that the kernel ended, Unanswered that it does not tell how the code did. Cancelled,
        it leaves the code running."""
        if self.died.done():
            raise Died(self.how())
        answered = _Answered(sink)
        try:
            await self._ask("execute_request", {
                "code": code,
                "silent": silent,
                "store_history": not silent,
                "user_expressions": {},
                "allow_stdin": False,
                "stop_on_error": False,
            }, answered)
            await asyncio.wait({answered.half, self.died}, return_when=asyncio.FIRST_COMPLETED)
            # Each of the two may come last, and publishing is not reliable.
            await asyncio.wait({answered.done, self.died}, timeout=SETTLE_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            if self.died.done() and not answered.done.done():
                raise Died(self.how())
            if not answered.replied:
                raise Unanswered("the kernel does not tell how the code ended: it may be incomplete, or has broken the kernel, which a restart of the context mends")
        finally:
            self._run = None

    def how(self):
        """How the process ended."""
        code = self.died.result()
        if code == -signal.SIGKILL:
            return "it was killed, as happens when memory runs out"
        if code < 0:
            return f"it died of {signal.Signals(-code).name}"
        return f"it ended with status {code}"

    async def interrupt(self):
        """Asks the kernel to stop what it runs."""
        if self.died.done():
            return
        if self.language.interrupt_by_message:
            await self._send(self._client.control_channel, self._client.session.msg("interrupt_request", {}))
        else:
            os.killpg(self.process.pid, signal.SIGINT)

    async def stop(self):
        """Ends the process, and all that share its session."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await self.died
        for pump in self._pumps:
            pump.cancel()
        self._client.stop_channels()
        try:
            os.unlink(self._file)
        except FileNotFoundError:
            pass


class _Answered:
    """Waits for the reply to a request and for the end of what was published about it."""

    def __init__(self, sink=None):
        loop = asyncio.get_running_loop()
        self.half, self.done = loop.create_future(), loop.create_future()
        self._seen = set()
        self._sink = sink
        self.replied = False

    def take(self, message):
        kind = message["msg_type"]
        if self._sink is not None:
            self._sink.take(message)
        if kind == "status" and message["content"]["execution_state"] == "idle" or kind.endswith("_reply"):
            self._seen.add(kind)
            self.replied = self.replied or kind.endswith("_reply")
            if not self.half.done():
                self.half.set_result(None)
            if len(self._seen) == 2 and not self.done.done():
                self.done.set_result(None)

"""Tests of the server over fake kernels: needs tornado and jupyter_client, no more."""
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

import tornado.httpclient  # noqa: E402
import tornado.httpserver  # noqa: E402
import tornado.netutil  # noqa: E402
import tornado.web  # noqa: E402

import context  # noqa: E402
import kernel  # noqa: E402
import languages  # noqa: E402
import server  # noqa: E402

BOUND = 60  # seconds that something may take which must come


class Fake(languages.Language):
    def command(self, connection):
        return [sys.executable, os.path.join(HERE, "fake_kernel.py"), connection]

    def set_env(self, values):
        return "set " + json.dumps(values)


class Missing(Fake):
    def installed(self):
        return False


class Broken(Fake):
    def command(self, connection):
        return [sys.executable, "-c", "raise SystemExit(7)"]


class Agent(tornado.web.RequestHandler):
    """The guest agent's GET /envs."""

    def get(self):
        if self.request.headers.get("X-Access-Token") != "secret":
            raise tornado.web.HTTPError(401)
        self.finish({"FROM_SANDBOX": "yes", "not a name": "x"})


class Case(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        context.INTERRUPT_GRACE = BOUND  # a busy machine takes long for anything
        languages.ALL = {"python": Fake(), "javascript": Fake(), "typescript": Fake(), "java": Missing(), "r": Broken()}
        self.home = tempfile.mkdtemp()
        self.servers = []
        agent = self.listen(tornado.web.Application([("/envs", Agent)]))
        self.interpreter = server.Interpreter(self.home, agent + "/envs")
        await self.interpreter.begin()
        self.url = self.listen(server.application(self.interpreter))

    async def asyncTearDown(self):
        for c in list(self.interpreter.contexts):
            await self.interpreter.remove(c)
        for s in self.servers:
            s.stop()
        os.rmdir(self.home)

    def listen(self, application):
        sockets = tornado.netutil.bind_sockets(0, "127.0.0.1")
        s = tornado.httpserver.HTTPServer(application, max_body_size=server.BODY_LIMIT)
        s.add_sockets(sockets)
        self.servers.append(s)
        return "http://127.0.0.1:%d" % sockets[0].getsockname()[1]

    async def ask(self, method, path, body=None, headers=None):
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
        return await tornado.httpclient.AsyncHTTPClient().fetch(
            self.url + path, method=method, body=body, headers=headers or {}, raise_error=False,
            allow_nonstandard_methods=True, request_timeout=BOUND)

    async def run_code(self, code, headers=None, **fields):
        """The events of an execution but the two that every one has."""
        answer = await self.ask("POST", "/execute", {"code": code, **fields}, headers)
        self.assertEqual(answer.code, 200, answer.body)
        events = [json.loads(line) for line in answer.body.splitlines()]
        self.assertEqual(events[-1], {"type": "end_of_execution"})
        return [e for e in events[:-1] if e["type"] not in ("number_of_executions", "keepalive")]

    async def text(self, code, **fields):
        events = await self.run_code(code, **fields)
        self.assertEqual([e["type"] for e in events], ["stdout"], events)
        return events[0]["text"]

    async def error(self, code, **fields):
        events = await self.run_code(code, **fields)
        self.assertEqual([e["type"] for e in events], ["error"], events)
        return events[0]


class Events(Case):
    async def test_stream(self):
        answer = await self.ask("POST", "/execute", {"code": "print a\ndisplay {\"text/plain\": \"shown\"}\nvalue {\"text/plain\": \"'v'\"}"})
        events = [json.loads(line) for line in answer.body.splitlines()]
        stamp = events[1].pop("timestamp")
        self.assertRegex(stamp, r"^\d{4}-\d\d-\d\dT[\d:.]+(\+00:00|Z)$")
        self.assertEqual(events, [
            {"type": "number_of_executions", "execution_count": 1},
            {"type": "stdout", "text": "a\n"},
            {"type": "result", "is_main_result": False, "extra": {}, "text": "shown"},
            {"type": "result", "is_main_result": True, "extra": {}, "text": "v"},
            {"type": "end_of_execution"},
        ])

    async def test_kinds(self):
        kinds = dict(context.FIELDS)
        data = {kind: {"a": 1} if field in ("json", "data", "chart") else field for kind, field in kinds.items()}
        data["application/geo+json"] = {"type": "Point"}
        [event] = await self.run_code("value " + json.dumps(data))
        self.assertEqual(event.pop("extra"), {"application/geo+json": {"type": "Point"}})
        for kind, field in kinds.items():
            self.assertEqual(event[field], data[kind])

    async def test_error(self):
        self.assertEqual(await self.error("nonsense"), {
            "type": "error", "name": "ValueError", "value": "no such word: nonsense", "traceback": "one\ntwo"})
        self.assertEqual(await self.text("print on"), "on\n")

    async def test_end_that_is_not_published(self):
        kernel.SETTLE_TIMEOUT = 0.1
        self.addCleanup(setattr, kernel, "SETTLE_TIMEOUT", 10)
        self.assertEqual(await self.run_code("mute"), [])

    async def test_reply_that_does_not_come(self):
        kernel.SETTLE_TIMEOUT = 0.1
        self.addCleanup(setattr, kernel, "SETTLE_TIMEOUT", 10)
        error = await self.error("dumb")
        self.assertEqual(error["name"], "UnexpectedEndOfExecution")
        self.assertIn("incomplete", error["value"])

    async def test_messages_that_are_none(self):
        self.assertEqual(await self.text("odd\nprint on"), "on\n")

    async def test_texts(self):
        [event] = await self.run_code("value " + json.dumps({"text/plain": 5, "text/html": ["<p>", "</p>"], "image/png": {"a": 1}}))
        self.assertEqual((event["text"], event["html"], event["png"]), ("5", "<p></p>", "{'a': 1}"))

    async def test_many_at_once(self):
        answers = await asyncio.gather(*(self.text(f"print {i}") for i in range(60)))
        self.assertEqual(answers, [f"{i}\n" for i in range(60)])


class Environment(Case):
    async def test_of_a_call(self):
        self.assertEqual(await self.text("env A", env_vars={"A": "it's\n\"$B\""}), "it's\n\"$B\"")
        self.assertEqual(await self.text("env A"), "nothing")

    async def test_what_the_process_has_comes_back(self):
        home = await self.text("env HOME")
        self.assertEqual(await self.text("env HOME", env_vars={"HOME": "x"}), "x")
        self.assertEqual(await self.text("env HOME"), home)

    async def test_after_an_error(self):
        await self.error("nonsense", env_vars={"A": "1"})
        self.assertEqual(await self.text("env A"), "nothing")

    async def test_of_the_sandbox(self):
        self.assertEqual(await self.text("env FROM_SANDBOX"), "nothing")  # without the token
        token = {"X-Access-Token": "secret"}
        self.assertEqual(await self.text("env FROM_SANDBOX", headers=token), "yes")
        self.assertEqual(await self.text("env FROM_SANDBOX", env_vars={"FROM_SANDBOX": "other"}), "other")
        self.assertEqual(await self.text("env FROM_SANDBOX"), "yes")

    async def test_of_a_context(self):
        made = json.loads((await self.ask("POST", "/contexts", {"env_vars": {"A": "of the context"}})).body)
        self.assertEqual(await self.text("env A", context_id=made["id"]), "of the context")
        self.assertEqual(await self.text("env A", context_id=made["id"], env_vars={"A": "of the call"}), "of the call")
        self.assertEqual(await self.text("env A", context_id=made["id"]), "of the context")
        self.assertEqual(await self.text("env A"), "nothing")


class Port(unittest.IsolatedAsyncioTestCase):
    async def test_of_another_server(self):
        other = tornado.netutil.bind_sockets(0, "127.0.0.1")
        port = other[0].getsockname()[1]
        taking = asyncio.ensure_future(server.take_port(port))
        done, _ = await asyncio.wait({taking}, timeout=0.1)
        self.assertFalse(done, "two servers have one port")
        for s in other:
            s.close()
        for s in await asyncio.wait_for(taking, BOUND):
            self.assertEqual(s.getsockname()[1], port)
            s.close()


class Contexts(Case):
    async def list(self):
        return json.loads((await self.ask("GET", "/contexts")).body)

    async def test_defaults(self):
        self.assertEqual([(c["language"], c["cwd"]) for c in await self.list()], [("python", self.home), ("javascript", self.home)])
        await self.text("print x", language=" TS ")
        self.assertEqual([c["language"] for c in await self.list()], ["python", "javascript", "typescript"])

    async def test_create_and_remove(self):
        made = json.loads((await self.ask("POST", "/contexts", {"language": "js", "cwd": "/"})).body)
        self.assertEqual((made["language"], made["cwd"]), ("javascript", "/"))
        self.assertEqual((await self.list())[-1], made)
        self.assertEqual(await self.text("cwd", context_id=made["id"]), "/")
        self.assertEqual((await self.ask("DELETE", "/contexts/" + made["id"])).code, 200)
        self.assertNotIn(made, await self.list())
        for answer in (
            await self.ask("DELETE", "/contexts/" + made["id"]),
            await self.ask("POST", "/contexts/" + made["id"] + "/restart", ""),
            await self.ask("POST", "/execute", {"code": "x", "context_id": made["id"]}),
        ):
            self.assertEqual((answer.code, answer.body.decode()), (404, f"Context {made['id']} not found"))

    async def test_removed_while_it_runs(self):
        made = json.loads((await self.ask("POST", "/contexts", {})).body)
        run = asyncio.create_task(self.error("sleep 600", context_id=made["id"]))
        waits = asyncio.create_task(self.error("print never", context_id=made["id"]))
        await self.until_running(made["id"])
        await self.ask("DELETE", "/contexts/" + made["id"])
        self.assertEqual((await run)["name"], "ContextRemoved")
        self.assertEqual((await waits)["name"], "ContextRemoved")

    async def test_restarted_while_it_runs(self):
        made = json.loads((await self.ask("POST", "/contexts", {})).body)
        await self.run_code('set {"A": "1"}', context_id=made["id"])
        run = asyncio.create_task(self.error("sleep 600", context_id=made["id"]))
        await self.until_running(made["id"])
        self.assertEqual((await self.ask("POST", f"/contexts/{made['id']}/restart", "")).code, 200)
        self.assertEqual((await run)["name"], "ContextRestarting")
        self.assertEqual(await self.text("env A", context_id=made["id"]), "nothing")

    async def until_running(self, context_id):
        c = self.interpreter.contexts[context_id]
        async with asyncio.timeout(BOUND):
            while not (c._current and c._kernel and c._kernel._run):
                await asyncio.sleep(0.01)

    async def test_refused(self):
        for path, body, code in (
            ("/contexts", {"language": "cobol"}, 400),
            ("/contexts", {"language": "java"}, 400),  # its kernel is not installed
            ("/contexts", {"language": "r"}, 500),  # and this one does not start
            ("/contexts", {"cwd": "/nowhere"}, 400),
            ("/contexts", {"cwd": 1}, 422),
            ("/contexts", {"env_vars": {"A": 1}}, 400),
            ("/execute", {"code": "x", "language": "python", "context_id": "y"}, 400),
            ("/execute", {"code": "x", "context_id": "y"}, 404),
            ("/execute", {"code": "x", "language": "cobol"}, 400),
            ("/execute", {"code": 1}, 422),
            ("/execute", {}, 422),
            ("/execute", [], 400),
            ("/execute", "{", 400),
            ("/execute", "[" * 100_000, 400),
            ("/execute", b"\xff", 400),
            ("/execute", {"code": "x", "env_vars": {"A=B": "c"}}, 400),
            ("/execute", {"code": "x", "env_vars": {"A": "\0"}}, 400),
            ("/execute", {"code": "x", "env_vars": {"A": "x" * (1 << 20)}}, 400),
            ("/execute", {"code": "x", "env_vars": {f"A{i}": "" for i in range(2000)}}, 400),
        ):
            answer = await self.ask("POST", path, body)
            self.assertEqual(answer.code, code, (body, answer.body[:200]))
            self.assertEqual(answer.headers["Content-Type"], "text/plain; charset=utf-8")
            self.assertTrue(answer.body)
        self.assertEqual(len(await self.list()), 2)

    async def test_bounds(self):
        server.CONTEXT_LIMIT, context.QUEUE_LIMIT = 3, 1
        self.addCleanup(setattr, server, "CONTEXT_LIMIT", 64)
        self.addCleanup(setattr, context, "QUEUE_LIMIT", 100)
        self.assertEqual((await self.ask("POST", "/contexts", {})).code, 200)
        self.assertEqual((await self.ask("POST", "/contexts", {})).code, 429)
        c = await self.list()
        first = asyncio.create_task(self.run_code("sleep 600", context_id=c[-1]["id"]))
        await self.until_running(c[-1]["id"])
        second = asyncio.create_task(self.run_code("print 2", context_id=c[-1]["id"]))
        async with asyncio.timeout(BOUND):
            while self.interpreter.contexts[c[-1]["id"]]._queue.empty():
                await asyncio.sleep(0.01)
        self.assertEqual((await self.ask("POST", "/execute", {"code": "x", "context_id": c[-1]["id"]})).code, 429)
        await self.ask("DELETE", "/contexts/" + c[-1]["id"])
        await asyncio.gather(first, second)


class Ends(Case):
    async def test_the_kernel_dies(self):
        for code, how in (("die", "killed"), ("exit 3", "status 3")):
            error = await self.error(code)
            self.assertEqual(error["name"], "ContextRestarting")
            self.assertIn(how, error["value"])
            self.assertEqual(await self.text("print on"), "on\n")

    async def test_the_kernel_dies_between_two_calls(self):
        await self.text("print x")
        k = self.interpreter._default["python"]._kernel
        k.process.kill()
        await k.died
        told, text = await self.run_code("print on")
        self.assertEqual((told["type"], text["text"]), ("stderr", "on\n"))
        self.assertIn("started anew", told["text"])
        self.assertEqual(await self.text("print on"), "on\n")

    async def test_code_ends_its_kernel(self):
        self.assertEqual(await self.run_code("quit"), [])
        told, text = await self.run_code("print on")
        self.assertIn("its code ended it", told["text"])
        self.assertEqual(text["text"], "on\n")

    async def test_time_is_over(self):
        self.assertEqual((await self.error("sleep 600", timeout=0.2))["name"], "ExecutionTimeout")
        self.assertEqual(await self.text("print on"), "on\n")

    async def test_what_does_not_stop_is_killed(self):
        context.INTERRUPT_GRACE = 0.2
        self.assertEqual((await self.error("spin", timeout=0.2))["name"], "ExecutionTimeout")
        told, text = await self.run_code("print on")
        self.assertIn("did not stop", told["text"])
        self.assertEqual(text["text"], "on\n")

    async def test_the_client_goes(self):
        reader, writer = await asyncio.open_connection(*self.url[7:].split(":"))
        body = json.dumps({"code": "print started\nsleep 600"}).encode()
        writer.write(b"POST /execute HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(BOUND):
            await reader.readuntil(b"started")
            writer.close()
            self.assertEqual(await self.text("print on"), "on\n")

    async def test_a_silent_stream_says_that_it_lives(self):
        server.KEEPALIVE = 0.05
        self.addCleanup(setattr, server, "KEEPALIVE", 5)
        answer = await self.ask("POST", "/execute", {"code": "sleep 0.5"})
        self.assertIn(b'{"type":"keepalive"}\n', answer.body)

    async def test_a_client_that_does_not_read(self):
        context.OUTPUT_LIMIT = 4 << 20
        self.addCleanup(setattr, context, "OUTPUT_LIMIT", kernel.OUTPUT_LIMIT)
        reader, writer = await asyncio.open_connection(*self.url[7:].split(":"), limit=1 << 26)
        body = json.dumps({"code": "flood 10000"}).encode()
        writer.write(b"POST /execute HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(BOUND):
            self.assertEqual(await self.text("print on"), "on\n")  # while nobody reads the other
            rest = await reader.read()
        self.assertIn(b"OutputLimitExceeded", rest)
        self.assertTrue(rest.endswith(server.END))
        writer.close()


class Health(Case):
    async def test_health(self):
        answer = await self.ask("GET", "/health")
        self.assertEqual((answer.code, answer.body), (200, b'"OK"'))
        self.assertEqual(answer.headers["Access-Control-Allow-Origin"], "*")
        self.assertEqual((await self.ask("OPTIONS", "/execute")).code, 204)
        self.assertEqual((await self.ask("GET", "/elsewhere")).code, 404)


class Languages(unittest.TestCase):
    def test_quoting(self):
        values = {"A": "it's \"quoted\" $HOME `x` \\ \n\u00e9\u2028", "B": None}
        env = {"B": "there", "PATH": os.environ["PATH"]}
        out = subprocess.run(
            [sys.executable, "-c", languages.Python().set_env(values) + "\nimport os, json\nprint(json.dumps([os.environ.get('A'), os.environ.get('B')]))"],
            env=env, capture_output=True, check=True).stdout
        self.assertEqual(json.loads(out), [values["A"], None])
        out = subprocess.run(
            ["bash", "-c", languages.Bash().set_env(values) + '\nprintf %s "$A${B-gone}"'], env=env, capture_output=True, check=True).stdout
        self.assertEqual(out.decode(), values["A"] + "gone")
        out = subprocess.run(
            ["node", "-e", languages.JavaScript().set_env(values) + ';console.log(JSON.stringify([process.env.A, process.env.B ?? null]))'],
            env=env, capture_output=True, check=True).stdout
        self.assertEqual(json.loads(out), [values["A"], None])


if __name__ == "__main__":
    unittest.main()

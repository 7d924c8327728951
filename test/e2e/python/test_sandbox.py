"""The official Python SDK, sync and async, against a running server."""

import asyncio
import hashlib
import os
import time
import urllib.error
import urllib.request

import pytest
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    FilesystemEventType,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)


@pytest.fixture(scope="module")
def sandbox():
    sandbox = Sandbox.create(timeout=300)
    yield sandbox
    sandbox.kill()


def test_life_cycle():
    sandbox = Sandbox.create(timeout=60, metadata={"py k": "v&=1"}, envs={"GREETING": "hello"})
    try:
        assert sandbox.is_running()
        assert sandbox.commands.run("echo $GREETING").stdout == "hello\n"
        info = sandbox.get_info()
        assert info.state == SandboxState.RUNNING
        assert info.metadata == {"py k": "v&=1"}
        listed = Sandbox.list(query=SandboxQuery(metadata={"py k": "v&=1"})).next_items()
        assert [item.sandbox_id for item in listed] == [sandbox.sandbox_id]
        sandbox.set_timeout(120)
        assert (sandbox.get_info().end_at - info.end_at).total_seconds() > 50
    finally:
        assert sandbox.kill()
    assert not sandbox.kill()
    assert not sandbox.is_running()
    with pytest.raises(NotFoundException):
        Sandbox.connect(sandbox.sandbox_id)


def test_wrong_key():
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "f" * 40)


def test_timeout_kills():
    sandbox = Sandbox.create(timeout=1)
    time.sleep(2)
    assert not sandbox.is_running()


def test_pause_and_resume():
    sandbox = Sandbox.create(timeout=60)
    try:
        sandbox.files.write("kept", "file")
        process = sandbox.commands.run("sleep 300", background=True)
        sandbox.pause()
        assert sandbox.get_info().state == SandboxState.PAUSED
        resumed = Sandbox.connect(sandbox.sandbox_id)
        assert resumed.files.read("kept") == "file"
        assert process.pid in [p.pid for p in resumed.commands.list()]
    finally:
        sandbox.kill()


def test_idempotent_create():
    key = "py-" + str(time.time_ns())
    first = Sandbox.create(timeout=60, idempotency_key=key)
    second = Sandbox.create(timeout=60, idempotency_key=key)
    try:
        assert first.sandbox_id == second.sandbox_id
        assert first.commands.run("echo one").stdout == second.commands.run("echo one").stdout
        with pytest.raises(SandboxException, match="422"):
            Sandbox.create(timeout=61, idempotency_key=key)
    finally:
        first.kill()
        second.kill()


def test_commands(sandbox):
    result = sandbox.commands.run("printf out; printf err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out", "err", 0)
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo half; exit 3")
    assert (failed.value.exit_code, failed.value.stdout) == (3, "half\n")
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 60", timeout=1)
    assert sandbox.commands.run("whoami; pwd", user="root", cwd="/").stdout == "root\n/\n"
    assert len(sandbox.commands.run("seq 1 200000").stdout) == 1_288_895


def test_stdin(sandbox):
    cat = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(cat.pid, "in\n")
    sandbox.commands.close_stdin(cat.pid)
    assert cat.wait().stdout == "in\n"


def test_background(sandbox):
    sleep = sandbox.commands.run("sleep 300", background=True)
    assert sleep.pid in [p.pid for p in sandbox.commands.list()]
    assert sandbox.commands.kill(sleep.pid)
    assert not sandbox.commands.kill(999_999)


def test_pty(sandbox):
    terminal = sandbox.pty.create(PtySize(rows=30, cols=90))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; echo end-$((6*7)); exit\n")
    seen = b""
    for _, _, data in terminal:
        seen += data or b""
    assert b"30 90" in seen and b"end-42" in seen


def test_files(sandbox):
    sandbox.files.write("py/a", "text")
    assert sandbox.files.read("py/a") == "text"
    data = os.urandom(4 << 20)
    sandbox.files.write("py/b", data)
    assert hashlib.sha256(sandbox.files.read("py/b", format="bytes")).digest() == hashlib.sha256(data).digest()
    assert [entry.name for entry in sandbox.files.list("py")] == ["a", "b"]
    assert sandbox.files.get_info("py/a").size == 4
    sandbox.files.rename("py/a", "py/c")
    assert not sandbox.files.exists("py/a") and sandbox.files.exists("py/c")
    assert sandbox.files.make_dir("py/d") and not sandbox.files.make_dir("py/d")
    sandbox.files.remove("py")
    with pytest.raises(FileNotFoundException):
        sandbox.files.read("py/c")


def test_polled_watch(sandbox):
    sandbox.files.make_dir("polled")
    handle = sandbox.files.watch_dir("polled")
    sandbox.files.write("polled/f", "1")
    events = []
    for _ in range(40):
        events += handle.get_new_events()
        if any(e.type == FilesystemEventType.WRITE for e in events):
            break
        time.sleep(0.05)
    assert any(e.type == FilesystemEventType.CREATE and e.name == "f" for e in events), events
    handle.stop()


def test_signed_urls(sandbox):
    sandbox.files.write("signed", "for you")
    url = sandbox.download_url("signed", use_signature_expiration=120)
    assert urllib.request.urlopen(url).read() == b"for you"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url.replace("signature=v1_", "signature=v1_x"))
    assert refused.value.code in (401, 404)


def test_metrics(sandbox):
    for _ in range(40):
        metrics = sandbox.get_metrics()
        if metrics:
            break
        time.sleep(0.25)
    assert metrics[-1].mem_total > 0 and metrics[-1].cpu_count >= 1


def test_async():
    async def one(number):
        sandbox = await AsyncSandbox.create(timeout=60)
        try:
            result = await sandbox.commands.run(f"echo {number}")
            await sandbox.files.write("f", str(number))
            return result.stdout, await sandbox.files.read("f")
        finally:
            await sandbox.kill()

    async def all_of_them():
        return await asyncio.gather(*(one(number) for number in range(8)))

    assert asyncio.run(all_of_them()) == [(f"{n}\n", str(n)) for n in range(8)]


def test_snapshots():
    sandbox = Sandbox.create(timeout=60)
    made = [sandbox]
    try:
        sandbox.files.write("/home/user/state", "one")
        snapshot = sandbox.create_snapshot()
        sandbox.files.write("/home/user/state", "two")
        made.append(Sandbox.create(snapshot.snapshot_id, timeout=60))
        assert made[1].files.read("/home/user/state") == "one"
        assert [s.snapshot_id for s in sandbox.list_snapshots().next_items()] == [snapshot.snapshot_id]
        assert Sandbox.delete_snapshot(snapshot.snapshot_id)
        assert not Sandbox.delete_snapshot(snapshot.snapshot_id)
        forks = sandbox.fork(count=2, timeout=60)
        made += forks
        assert [f.files.read("/home/user/state") for f in forks] == ["two", "two"]
        assert len({s.sandbox_id for s in made}) == 4
        boot = "cat /proc/sys/kernel/random/boot_id"
        before = sandbox.commands.run(boot).stdout
        sandbox.pause(keep_memory=False)
        sandbox.connect()
        assert sandbox.files.read("/home/user/state") == "two"
        assert sandbox.commands.run(boot).stdout != before
    finally:
        for s in made:
            s.kill()

"""What OpenAI's Agents SDK needs of E2B, by its newest package against a Berm server."""
import asyncio
import io

import pytest
from agents.extensions.sandbox import E2BSandboxClient, E2BSandboxClientOptions
from agents.sandbox import Manifest
from agents.sandbox.entries import File
from e2b import Sandbox
from model import Model


def test_example(example):
    run = {"cmd": "python3 -B test_calc.py; echo exit $?; env | grep -c not-for-sandboxes"}
    steps = [
        ("exec_command", run),
        ("exec_command", {"cmd": "sed -i 's/a - b/a + b/' calc.py && cat calc.py"}),
        ("exec_command", run),
        "add() subtracted.",
    ]
    with Model(steps) as model:
        assert example("openai_agent.py", model) == "add() subtracted.\n"
        assert "AssertionError: -1" in model.results[0] and "exit 1" in model.results[0]
        assert "return a + b" in model.results[1]
        assert "ok\nexit 0\n0\n" in model.results[2].replace("\r", "")


def session(**options):
    return E2BSandboxClient().create(
        options=E2BSandboxClientOptions("e2b", timeout=120, **options),
        manifest=Manifest(entries={"hello.txt": File(content=b"hello\n")}, environment={"value": {"WHERE": "inside"}}),
    )


def test_session():
    async def run():
        async with await session(envs={"BASE": "given"}) as s:
            done = await s.exec("cat hello.txt; echo $WHERE $BASE; exit 3")
            assert (done.stdout, done.exit_code) == (b"hello\ninside given\n", 3)
            await s.write("made/deep.bin", io.BytesIO(bytes(range(256))))
            assert (await s.read("made/deep.bin")).read() == bytes(range(256))
            with pytest.raises(Exception, match="(?i)not found|missing"):
                await s.read("missing")
            assert await s.running()
            # A terminal that is written to.
            begun = await s.pty_exec_start("read line; echo got $line", shell=True, tty=True, yield_time_s=0.5)
            assert begun.process_id is not None
            out = await s.pty_write_stdin(session_id=begun.process_id, chars="it\n", yield_time_s=5)
            assert b"got it" in out.output and out.exit_code is None  # a shell has the terminal, and waits
            out = await s.pty_write_stdin(session_id=begun.process_id, chars="exit 4\n", yield_time_s=5)
            assert out.exit_code == 4

    asyncio.run(run())


def test_timeout():
    async def run():
        async with await session() as s:
            with pytest.raises(Exception, match="(?i)timed? ?out"):
                await s.exec("sleep 60", timeout=1)
            assert (await s.exec("echo next")).stdout == b"next\n"

    asyncio.run(run())


def test_goes_on_with_a_paused_sandbox():
    async def run():
        client = E2BSandboxClient()
        async with await session(pause_on_exit=True) as s:
            await s.exec("echo kept > kept.txt")
            state = s.state
        assert [x.sandbox_id for x in Sandbox.list().next_items() if x.sandbox_id == state.sandbox_id and x.state == "paused"]
        again = await client.resume(client.deserialize_session_state(client.serialize_session_state(state)))
        again.state.pause_on_exit = False
        async with again as s:
            assert s.state.sandbox_id == state.sandbox_id
            assert (await s.exec("cat kept.txt hello.txt")).stdout == b"kept\nhello\n"
        await client.delete(again)
        Sandbox.kill(state.sandbox_id)

    asyncio.run(run())


@pytest.mark.parametrize("way", ["tar", "snapshot"])
def test_carries_a_workspace_over(way):
    async def run():
        async with await session(workspace_persistence=way) as s:
            await s.exec("mkdir -p d && echo kept > d/kept.txt && ln -s d/kept.txt link")
            carried = (await s.persist_workspace()).read()
            async with await session(workspace_persistence=way) as t:
                await t.hydrate_workspace(io.BytesIO(carried))
                assert (await t.exec("cat link hello.txt")).stdout == b"kept\nhello\n"
                fresh = t.state.sandbox_id
        for left in Sandbox.list().next_items():
            if left.sandbox_id == fresh:
                Sandbox.kill(fresh)

    asyncio.run(run())


def test_exposes_ports():
    async def run():
        async with await session(exposed_ports=(8000,)) as s:
            end = await s.resolve_exposed_port(8000)
            assert "8000" in end.url_for("http")

    asyncio.run(run())

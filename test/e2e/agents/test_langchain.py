"""What LangChain's deep agents need of E2B, by the newest packages against a Berm server."""
import asyncio

from e2b import AsyncSandbox, Sandbox
from langchain_e2b import AsyncE2BSandbox, E2BSandbox
from model import Model


def test_example(example):
    script = ("import csv, collections\n\nsold = collections.Counter()\nfor row in csv.DictReader(open('/home/user/sales.csv')):\n"
              "    sold[row['city']] += int(row['sold'])\nprint(dict(sold))\n")
    steps = [
        ("ls", {"path": "/home/user"}),
        ("read_file", {"file_path": "/home/user/sales.csv"}),
        ("write_file", {"file_path": "/home/user/total.py", "content": script.replace("dict(sold)", "sold")}),
        ("edit_file", {"file_path": "/home/user/total.py", "old_string": "print(sold)", "new_string": "print(dict(sold))"}),
        ("grep", {"pattern": "Counter()", "path": "/home/user"}),
        ("glob", {"pattern": "*.csv", "path": "/home/user"}),
        ("execute", {"command": "python3 total.py; python3 missing.py"}),
        "Bern sold 7 and Basel 5.",
    ]
    with Model(steps) as model:
        out = example("deep_agent.py", model)
        assert out == "Bern sold 7 and Basel 5.\n" + script + "\n"
        listed, read, _, _, found, matched, ran = model.results
        assert "/home/user/sales.csv" in listed
        assert "Basel,5" in read
        assert "total.py" in found
        assert "sales.csv" in matched and "total.py" not in matched
        assert "{'Bern': 7, 'Basel': 5}" in ran and "exit code 2" in ran


def test_backend():
    with Sandbox.create(timeout=120) as sandbox:
        backend = E2BSandbox(sandbox=sandbox)
        assert backend.id == sandbox.sandbox_id
        done = backend.execute("pwd; echo bad >&2; exit 5")
        assert (done.output, done.exit_code) == ("/home/user\n\nbad\n", 5)
        assert backend.execute("sleep 60", timeout=1).exit_code == 124
        paths = ["/home/user/a.bin", "/home/user/new/b.txt"]
        assert [r.error for r in backend.upload_files([(paths[0], bytes(range(256))), (paths[1], b"b")])] == [None, None]
        assert [r.content for r in backend.download_files(paths)] == [bytes(range(256)), b"b"]
        errors = [r.error for r in backend.download_files(["/home/user/missing", "/home/user", "relative"])]
        assert errors == ["file_not_found", "is_directory", "invalid_path"]


def test_backend_async():
    async def run():
        sandbox = await AsyncSandbox.create(timeout=120)
        try:
            backend = AsyncE2BSandbox(sandbox=sandbox)
            assert (await backend.awrite("/home/user/x.txt", "one\ntwo\n")).error is None
            assert (await backend.aedit("/home/user/x.txt", "two", "2")).occurrences == 1
            assert [m["text"] for m in (await backend.agrep("2", "/home/user", glob="*.txt")).matches] == ["2"]
            assert (await backend.als("/missing")).error
        finally:
            await sandbox.kill()

    asyncio.run(run())

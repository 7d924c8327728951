"""What the tests of agents' frameworks share."""
import os
import pathlib
import subprocess
import sys

import pytest
from e2b import Sandbox

EXAMPLES = pathlib.Path(os.environ["BERM_EXAMPLES"])


@pytest.fixture(autouse=True)
def nothing_left():
    before = {s.sandbox_id for s in Sandbox.list().next_items()}
    yield
    assert {s.sandbox_id for s in Sandbox.list().next_items()} == before


@pytest.fixture
def example():
    """Runs an example with a model, and returns what it prints."""

    def run(name, model):
        env = {**os.environ, "OPENAI_BASE_URL": model.url, "OPENAI_API_KEY": "sk-not-for-sandboxes"}
        done = subprocess.run([sys.executable, EXAMPLES / name], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run

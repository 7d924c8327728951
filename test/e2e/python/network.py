"""Headers that requests get on the way, with the official Python SDK. It needs the internet
that test/network makes, which runs it."""

import hashlib

from e2b import Sandbox, Secret


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def got(sandbox, field):
    return sandbox.commands.run(f"curl -sS --max-time 8 'https://www.example.com/hash?field={field}'").stdout


def rule(headers):
    return [{"transform": {"headers": headers}}]


def test_transform():
    Secret.destroy("py_network")
    Secret.create("py_network", "a-secret-value-of-the-test")
    rules = {"www.example.com": rule({"X-Injected": "by the rule", "Authorization": "Bearer " + Secret.fill("py_network")})}
    sandbox = Sandbox.create(timeout=60, network={"rules": rules})
    try:
        assert got(sandbox, "X-Injected") == digest("by the rule")
        assert got(sandbox, "Authorization") == digest("Bearer a-secret-value-of-the-test")
        assert "a-secret-value" not in sandbox.commands.run("curl -sS https://www.example.com/echo; env").stdout
        sandbox.update_network({"rules": {"*.example.com": rule({"X-Injected": "updated"})}})
        assert got(sandbox, "X-Injected") == digest("updated")
        assert got(sandbox, "Authorization") == digest("")
    finally:
        sandbox.kill()
        Secret.destroy("py_network")

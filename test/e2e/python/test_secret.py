"""Stored secrets with the official Python SDK. What is set on the way is in network.py."""

import pytest
from e2b import Secret, SecretNotFoundException


def test_secrets():
    name = "Py_Token"
    Secret.destroy(name)
    made = Secret.create(name, "first-value", metadata={"team": "a"})
    assert made.secret_id.startswith("sec_") and made.name == "py_token" and made.version == 1
    with pytest.raises(Exception, match="already"):
        Secret.create("py_token", "another")
    assert Secret.update(name, "second-value").version == 2
    info = Secret.get_info(made.secret_id)
    assert info.metadata == {"team": "a"} and "value" not in str(info)
    assert Secret.exists(name)
    assert Secret.destroy(name) and not Secret.destroy(name)
    with pytest.raises(SecretNotFoundException):
        Secret.update(name, "x")


@pytest.mark.parametrize("name", ["", "a b", "sec_x", "x" * 129])
def test_names(name):
    with pytest.raises(Exception, match="name"):
        Secret.create(name, "x")


def test_values():
    for value in ["", "x" * (65 * 1024)]:
        with pytest.raises(Exception, match="value"):
            Secret.create("py_other", value)
    with pytest.raises(Exception, match="metadata"):
        Secret.create("py_other", "x", metadata={str(i): "x" for i in range(33)})

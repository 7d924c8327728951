"""E2B's desktop SDK for Python, against a running server."""

import pytest
from e2b_desktop import Sandbox


@pytest.fixture(scope="module")
def desktop():
    desktop = Sandbox.create(timeout=600, resolution=(1280, 720))
    yield desktop
    desktop.kill()


def test_screen(desktop):
    assert desktop.get_screen_size() == (1280, 720)
    assert bytes(desktop.screenshot()[:4]) == b"\x89PNG"


def test_mouse(desktop):
    desktop.move_mouse(100, 200)
    assert desktop.get_cursor_position() == (100, 200)


def test_application(desktop):
    desktop.launch("xfce4-terminal")
    assert desktop._wait_and_verify("xdotool search --onlyvisible --class xfce4-terminal", lambda r: r.exit_code == 0, 120)
    (window,) = desktop.get_application_windows("xfce4-terminal")
    assert desktop.get_window_title(window).startswith("Terminal - user@")


def test_stream(desktop):
    desktop.stream.start(require_auth=True)
    assert desktop.stream.get_auth_key() in desktop.stream.get_url(auth_key=desktop.stream.get_auth_key())
    assert "noVNC" in desktop.commands.run("curl -s localhost:6080/vnc.html").stdout
    desktop.stream.stop()

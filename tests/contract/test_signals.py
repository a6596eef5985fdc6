"""The first signal drains, a second one stops at once. A process of its own, real signals."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import httpx
import pytest

from tests.contract.test_disconnect import posted

WAIT_SECONDS = 30
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


@contextmanager
def daemon(**settings: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A gated daemon and its URL."""
    with started(**settings) as process:
        yield process, wait_for(process.stderr, r"ready on (http://\S+)/v1")


@contextmanager
def started(**settings: str) -> Iterator["subprocess.Popen[str]"]:
    """A gated daemon that begins; killed at the end if a test left it running."""
    environment = os.environ | {f"ROOTSTOCK_{name.upper()}": v for name, v in settings.items()}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.contract.gated_daemon"],
        env=environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_log_says_where_the_dashboard_is() -> None:
    with started() as process:
        page = wait_for(process.stderr, r"the dashboard is on (\S+)\n")
        wait_for(process.stderr, r"(ready)")
        assert "<title>Rootstock</title>" in httpx.get(page, timeout=60).text


def wait_for(lines: IO[str] | None, pattern: str) -> str:
    """The pattern's group in the first line of the log that has it."""
    assert lines is not None
    found = next(match for line in lines if (match := re.search(pattern, line)))
    return found[found.re.groups]


def rest_of_log(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    return process.stderr.read()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_idle_daemon_stops_cleanly(stop: signal.Signals) -> None:
    with daemon() as (process, _):
        process.send_signal(stop)
        assert process.wait(WAIT_SECONDS) == 0
        assert "Traceback" not in rest_of_log(process)


def test_running_requests_finish_first() -> None:
    with daemon(keepalive_seconds="0.01") as (process, base_url):
        with posted(base_url, "/v1/chat/completions", CHAT) as connection:
            received = connection.makefile("rb")
            assert any(line.startswith(b": keep-alive") for line in received)
            process.send_signal(signal.SIGTERM)
            wait_for(process.stderr, "draining")
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert any(line == b"data: [DONE]\n" for line in received)
            received.close()
        assert process.wait(WAIT_SECONDS) == 0
        assert "Traceback" not in rest_of_log(process)


def test_a_draining_daemon_is_not_there_for_others() -> None:
    """So a router's health check fails at once, and what it sends on kept connections, too."""
    with daemon(keepalive_seconds="0.01") as (process, base_url):
        address = httpx.URL(base_url)
        with (
            posted(base_url, "/v1/chat/completions", CHAT) as running,
            socket.create_connection((address.host, address.port or 0), WAIT_SECONDS) as kept,
        ):
            assert running.recv(1)
            kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" in kept.recv(65536).partition(b"\r\n")[0]
            process.send_signal(signal.SIGTERM)
            while kept.recv(65536):
                pass
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address.host, address.port or 0), WAIT_SECONDS)
            assert process.poll() is None
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            received = running.makefile("rb")
            assert any(line == b"data: [DONE]\n" for line in received)
            received.close()
        assert process.wait(WAIT_SECONDS) == 0


def test_what_does_not_finish_in_time_is_told_so() -> None:
    settings = {"keepalive_seconds": "0.01", "drain_timeout_seconds": "0"}
    with (
        daemon(**settings) as (process, base_url),
        posted(base_url, "/v1/chat/completions", CHAT) as connection,
    ):
        received = connection.makefile("rb")
        assert any(line.startswith(b": keep-alive") for line in received)
        process.send_signal(signal.SIGTERM)
        assert any(b'"code":"engine_stopped"' in line for line in received)
        received.close()
        assert process.wait(WAIT_SECONDS) == 0
        assert "Traceback" not in rest_of_log(process)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(stop: signal.Signals) -> None:
    settings = {"keepalive_seconds": "0.01", "drain_timeout_seconds": "3600"}
    with (
        daemon(**settings) as (process, base_url),
        posted(base_url, "/v1/chat/completions", CHAT) as connection,
    ):
        assert connection.recv(1)
        process.send_signal(stop)
        wait_for(process.stderr, "draining")
        process.send_signal(stop)
        assert process.wait(WAIT_SECONDS) == -stop
        assert "Traceback" not in rest_of_log(process)

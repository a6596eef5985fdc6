"""Processes of daemons: the first signal drains, a second one stops at once, and file descriptors
do not run out.
"""

import json
import re
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from tests.contract.gated_daemon import daemon, line_of, rest_of_log, started
from tests.contract.wire import connected, is_healthy, posted
from tests.hub import Hub, checkpoint_files, serving_hub
from tests.polling import WAIT_SECONDS

pytestmark = pytest.mark.process

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


@pytest.mark.slow
def test_the_log_says_where_the_dashboard_is() -> None:
    with started() as process:
        page = line_of(process.stderr, r"the dashboard is on (\S+)\n")
        line_of(process.stderr, r"(ready)")
        assert "<title>Rootstock</title>" in httpx.get(page, timeout=60).text


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
            line_of(process.stderr, "finishing running requests")
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert any(line == b"data: [DONE]\n" for line in received)
            received.close()
        assert process.wait(WAIT_SECONDS) == 0
        assert "Traceback" not in rest_of_log(process)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(stop: signal.Signals) -> None:
    settings = {"keepalive_seconds": "0.01", "drain_timeout_seconds": "3600"}
    with (
        daemon(**settings) as (process, base_url),
        posted(base_url, "/v1/chat/completions", CHAT) as connection,
    ):
        assert connection.recv(1)
        process.send_signal(stop)
        line_of(process.stderr, "finishing running requests")
        process.send_signal(stop)
        assert process.wait(WAIT_SECONDS) == -stop
        assert "Traceback" not in rest_of_log(process)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/pull", {"model": "org/small"}),
        ("/api/pull", {"model": "org/small", "stream": False}),
        ("/v1/chat/completions", {"model": "org/small", **CHAT}),
    ],
)
def test_a_download_does_not_hold_up_the_end(
    tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    """The hub never sends the whole file, and no request may run for its drain time."""
    hub = Hub("org/small", checkpoint_files(DEFAULT_CHECKPOINT))
    config = tmp_path / "models.yaml"
    models = [{"model": "rootstock-demo"}, {"model": "org/small"}]
    config.write_text(json.dumps({"models": models, "preload": False, "memory_budget": "1GiB"}))
    settings = {"config": str(config), "drain_timeout_seconds": "3600"}
    with (
        serving_hub(hub, tmp_path / "hub") as environment,
        daemon(environment, **settings) as (process, base_url),
        posted(base_url, path, body),
    ):
        assert hub.requested.wait(WAIT_SECONDS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0
        said = rest_of_log(process)
    assert "Traceback" not in said
    assert "Thread 0x" not in said, "no dump of the stacks"
    assert "never retrieved" not in said


FEW = 100
MANY = 200
DAEMON = f'ulimit -n {FEW} && exec "{sys.executable}" -m tests.contract.gated_daemon'


def test_silent_connections_do_not_use_up_the_file_descriptors() -> None:
    with started(command=("sh", "-c", DAEMON)) as process:
        assert line_of(process.stderr, rf"({FEW // 2}) connections at most")
        base_url = line_of(process.stderr, r"ready on (http://\S+)/v1")
        with ExitStack() as stack:
            for _ in range(MANY):
                stack.enter_context(connected(base_url))
            assert is_healthy(base_url)
        process.terminate()
        log = rest_of_log(process)
    assert "Traceback" not in log
    assert len(re.findall("cannot accept", log)) <= 1

"""Whatever hangs, a signal ends the daemon in time, with a status that tells."""

import json
import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.polling import until
from tests.restart.asking import PATIENCE
from tests.restart.hung_daemon import HANGING, SAYS
from tests.restart.living import checkpoint, disk_flags, living

pytestmark = [pytest.mark.process, pytest.mark.slow]

BODY = json.dumps({"prompt": list(range(3, 200)), "max_tokens": 4}).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("qwen3", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("what", HANGING)
def test_a_signal_ends_a_daemon_in_which_something_hangs(
    model: Path, tmp_path: Path, what: str
) -> None:
    log = tmp_path / "log"
    flags = (
        *("--drain-timeout-seconds", "1", "--disk-cache-shutdown-seconds", "1"),
        *disk_flags(tmp_path / "kv", write="all"),
    )
    program = ("-m", "tests.restart.hung_daemon", what)
    with living(model, log, *flags, program=program) as daemon:
        url = httpx.URL(daemon.url)
        with socket.create_connection((url.host, url.port or 0)) as asking:
            asking.sendall(REQUEST)
            until(log.read_text, lambda said: SAYS in said, PATIENCE)
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(PATIENCE) == 1
    said = log.read_text()
    assert "finishing running requests, for up to 1 s" in said
    assert "Timeout (0:00:07)!" in said
    assert "in hang" in said  # where it did

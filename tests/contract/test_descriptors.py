"""More connections than file descriptors. A process of its own, with few of them."""

import re
import sys
from contextlib import ExitStack

import pytest

from tests.contract.gated_daemon import line_of, rest_of_log, started
from tests.contract.wire import connected, is_healthy

pytestmark = pytest.mark.process

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

"""More connections than file descriptors. A process of its own, with few of them."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.contract.test_connections import connected, is_healthy
from tests.contract.test_signals import rest_of_log, wait_for

pytestmark = pytest.mark.process

FEW = 100
MANY = 200
DAEMON = f'ulimit -n {FEW} && exec "{sys.executable}" -m tests.contract.gated_daemon'


def test_silent_connections_do_not_use_up_the_file_descriptors() -> None:
    with subprocess.Popen(
        ["sh", "-c", DAEMON],
        env=os.environ,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert wait_for(process.stderr, rf"({FEW // 2}) connections at most")
            base_url = wait_for(process.stderr, r"ready on (http://\S+)/v1")
            with ExitStack() as stack:
                for _ in range(MANY):
                    stack.enter_context(connected(base_url))
                assert is_healthy(base_url)
        finally:
            process.terminate()
        log = rest_of_log(process)
    assert "Traceback" not in log
    assert len(re.findall("cannot accept", log)) <= 1

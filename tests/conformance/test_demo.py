"""The embedded model answers few of its held-out questions; `python -m tests.conformance.demo` asks
many. Rows of very unlike lengths run together, which no other test has in such number.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["auto", "q8"])
def test_answers_of_a_crowded_engine_are_those_of_questions_asked_alone(kv_format: str) -> None:
    options = ["--per-task", "6", "--kv-format", kv_format]
    command = [sys.executable, "-m", "tests.conformance.demo", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "156 answers, 0 differ" in ended.stdout

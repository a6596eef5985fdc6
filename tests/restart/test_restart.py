"""The short form: a kill, then flipped bits. `python -m tests.restart` has the rest."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.disk_store_harness import extent_files, flip, offset_of
from tests.restart.kills import Lives, answered
from tests.restart.living import MIB, checkpoint
from tests.restart.questions import Load

pytestmark = [pytest.mark.process, pytest.mark.slow]

SEED = 7
LOAD = Load(systems=1, endings=3, conversations=3, turns=2, unique=0, answer_tokens=6)
FLIPPED_BYTES = slice(3, None, 20_000)
"""Several of every entry, each with the exponent of a float."""


def test_a_kill_and_flipped_bits_cost_no_token_and_no_request(tmp_path: Path) -> None:
    model, randomness = checkpoint("qwen3", tmp_path), random.Random(SEED)
    questions = asyncio.run(answered(model, tmp_path / "log", LOAD, SEED))
    lives = Lives(model, tmp_path, questions, randomness)
    asyncio.run(lives.die_after_writing(3 * MIB))
    *damaged, _ = extent_files(tmp_path / "kv")  # the last is above others: it can be loaded
    assert damaged
    for path in damaged:
        for offset in range(offset_of(path, 0), path.stat().st_size)[FLIPPED_BYTES]:
            flip(path, offset)
    asyncio.run(lives.last(faults={"checksum"}))

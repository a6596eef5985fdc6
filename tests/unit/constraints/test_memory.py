"""What a grammar process says of its memory."""

import sys

import pytest

from engine.constraints.worker.memory import MemoryMeter


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that says what is taken")
def test_what_is_taken_is_not_left() -> None:
    meter = MemoryMeter()
    before = meter.bytes_left()
    taken = bytearray(64 << 20)
    assert before - meter.bytes_left() >= len(taken)

"""What a grammar process says of its memory."""

import mmap
import sys

import pytest

from engine.grammar.worker.memory import MemoryMeter


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that says what is taken")
def test_what_is_taken_is_not_left() -> None:
    meter = MemoryMeter()
    before = meter.bytes_left()
    # New to the process: an allocator might give what it has had before.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        assert before - meter.bytes_left() >= len(taken)

"""What a disk cache's limits are for a model, and how much of a prompt that is."""

import math
from pathlib import Path

from engine.disk_cache.cache import disk_limits, kept_tokens
from engine.values.settings import DiskCacheConfig
from kvstore.disk.space import SPARE_BYTES, longest_path
from kvstore.disk.types import MIB


def test_the_buffer_takes_the_largest_entry() -> None:
    """Else a block with a saved state of 80 MiB would never be written."""
    config = DiskCacheConfig(Path("disk"), max_bytes=1024 * MIB)
    assert disk_limits(config, (MIB, MIB, 80 * MIB)).buffer_bytes == 82 * MIB
    assert disk_limits(config, (MIB, 0)).buffer_bytes == 64 * MIB


def test_what_is_kept_of_a_prompt_counts_windows_and_a_state() -> None:
    path_bytes = longest_path(64 * MIB)
    assert path_bytes == (64 * MIB - SPARE_BYTES) * 3 // 4
    assert kept_tokens(64 * MIB, (MIB, 0), 32) == path_bytes // MIB * 32
    assert kept_tokens(64 * MIB, (MIB, 2 * MIB, 14 * MIB), 32) == 11 * 32
    assert kept_tokens(64 * MIB, (MIB, 0, 50 * MIB), 32) == 0


def test_recurrent_layers_alone_have_no_limit_but_their_state() -> None:
    """Such a daemon did not start."""
    assert kept_tokens(64 * MIB, (0, MIB), 32) == math.inf
    assert kept_tokens(64 * MIB, (0, 50 * MIB), 32) == 0

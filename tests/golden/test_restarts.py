"""What one engine has written to disk serves the next one as its own memory would."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.core.inbox import Inbox
from engine.disk_cache.cache import DiskCache
from engine.disk_cache.loader import LoadRules
from engine.disk_cache.writer import WriteRules
from engine.mlx_backend.kv.storage import Storage
from engine.values.request import Request, SamplingParams
from engine.values.settings import DiskWrites, KVFormat
from engine.values.tokens import pack
from kvstore.disk.store import DiskStore
from kvstore.disk.types import DiskLimits
from kvstore.store import KVStore
from tests.golden.conftest import ATTENTION
from tests.golden.driving import random_tokens
from tests.offline import OfflineDaemon, Room, Served, load

LIMIT_BYTES = 256 << 20
SECONDS = 60.0
ROOM = Room(n_blocks=128)


def disk_cache(
    directory: Path, inbox: Inbox, limit_bytes: int = LIMIT_BYTES
) -> Callable[[KVStore, Storage], DiskCache]:
    """Makes the disk cache of an engine with this inbox, which writes when it stops."""

    def make(store: KVStore, storage: Storage) -> DiskCache:
        return DiskCache(
            DiskStore.open(directory, storage.kv_format, DiskLimits(limit_bytes)),
            store,
            storage.part_bytes,
            limit_bytes,
            inbox.post,
            WriteRules(writes=DiskWrites.EXIT, least_tokens=32),
            LoadRules(least_tokens=32, worth=1e9, timeout_seconds=SECONDS),
            SECONDS,
        )

    return make


class Daemon:
    """One life of an engine over a directory."""

    def __init__(self, served: Served, directory: Path) -> None:
        inbox, attention = Inbox(), ATTENTION["gather"]()
        disk = disk_cache(directory, inbox)
        self._engine = OfflineDaemon(served, attention, ROOM, disk=disk, inbox=inbox)

    def serve(self, name: str, prompt: list[int]) -> tuple[list[int], int]:
        """What it says, and how many tokens it found cached."""
        sampling = SamplingParams(temperature=0)
        self._engine.add(Request(name, pack(prompt), max_tokens=8, sampling=sampling))
        said = list[int]()
        engine = self._engine
        while not engine.loop.is_idle:
            for event in engine.turn():
                assert event.error is None
                said += event.token_ids
                if event.usage:
                    cached_tokens = event.usage.cached_tokens
            time.sleep(0.001)
        return said, cached_tokens

    def end(self) -> None:
        self._engine.loop.stop()
        self._engine.loop.run()


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3", "qwen3_4bit", "gemma3_text", "mamba2"),
        *("qwen3_next", "qwen3_next_4bit", "deepseek_v3", "deepseek_v41"),
        *("qwen3_q8", "qwen3_k8v4", "gemma3_text_q8", "qwen3_next_q8"),
    ],
)
def test_a_restart_finds_what_memory_had(
    served_of: Callable[[str], Served], family: str, tmp_path: Path
) -> None:
    served, prompt = served_of(family), random_tokens(301, seed=5)
    first = Daemon(served, tmp_path)
    expected, _ = first.serve("cold", prompt)
    again, in_memory = first.serve("warm", prompt)
    first.end()
    second = Daemon(served, tmp_path)
    said, from_disk = second.serve("restarted", prompt)
    second.end()
    assert said == again == expected
    assert from_disk >= 0.97 * in_memory > 0


def test_what_is_on_disk_in_one_format_is_read_in_no_other(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint, prompt = checkpoint_of("qwen3_q8"), random_tokens(90, seed=6)
    answers = dict[KVFormat, list[int]]()
    for is_known in (False, True):
        for kv_format in (KVFormat.FULL, KVFormat.F16, KVFormat.Q8, KVFormat.K8V4):
            daemon = Daemon(load(checkpoint, kv_format=kv_format), tmp_path)
            said, from_disk = daemon.serve("asked", prompt)
            daemon.end()
            assert (from_disk > 0) is is_known
            assert said == answers.setdefault(kv_format, said)

"""What a daemon with a disk cache finds of an earlier one's prompts."""

import asyncio
from collections.abc import Collection, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import pytest

from engine.api import Engine
from engine.build import load
from engine.values.request import Request, SamplingParams
from engine.values.settings import DiskCacheConfig, DiskWrites, EngineConfig
from engine.values.stats import CacheTier
from engine.values.tokens import pack
from engine.values.tree import TreeSnapshot
from kvstore.disk.types import MIB, DiskError
from measuring.random_checkpoint import tiny_tokenizer, write_checkpoint
from tests.checkpoints import FAMILIES
from tests.disk_store_harness import PATIENCE, extent_files
from tests.golden.driving import random_tokens
from tests.hosting import hosted, launched, loaded
from tests.polling import until
from tests.unit.threaded_harness import Letters
from tools.events import events_of

pytestmark = [pytest.mark.process, pytest.mark.slow]

TOKEN_BYTES = 64 << 10
PROMPT, SHORT = random_tokens(450, seed=1), random_tokens(40, seed=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose KV is large for its weights: 64 KiB a token."""
    config = {
        **FAMILIES["qwen3"].config,
        **{"num_hidden_layers": 8, "num_attention_heads": 8},
        **{"num_key_value_heads": 8, "head_dim": 128},
    }
    directory = tmp_path_factory.mktemp("models") / "large-kv"
    write_checkpoint(directory, config, 0, tiny_tokenizer(), mx.float32)
    return directory


class Lives:
    """Engines over one directory, one after the other, on a thread of this process: an import of
    MLX takes longer than what they compute. tests/restart has daemons.
    """

    def __init__(self, model: Path, disk: DiskCacheConfig) -> None:
        self.config = EngineConfig(str(model), kv_cache_bytes=64 * MIB, max_running=2, disk=disk)
        self.said: list[str] = []

    def serve(self, *prompts: Sequence[int]) -> list[int]:
        """How many tokens of each prompt were cached in an engine that is then ended."""
        build = partial(load, self.config, self.said.append)
        return asyncio.run(_serve(hosted(build, Letters()), prompts))


async def _serve(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[int]:
    try:
        return [await _ask(engine, str(n), prompt) for n, prompt in enumerate(prompts)]
    finally:
        await engine.drain(10.0)


async def _ask(engine: Engine, name: str, prompt: Sequence[int], cache_salt: str = "") -> int:
    sampling = SamplingParams(temperature=0)
    request = Request(name, pack(prompt), 2, sampling, cache_salt=cache_salt)
    cached_tokens = -1
    async for event in events_of(engine, request):
        assert event.error is None
        if event.usage is not None:
            cached_tokens = event.usage.cached_tokens
    return cached_tokens


def test_of_a_prompt_larger_than_the_cache_the_beginning_is_kept(
    model: Path, tmp_path: Path
) -> None:
    """The daemon is ended at once after its only answer. Its end used to push its beginning out,
    again and again until there was no time left.
    """
    lives = Lives(model, DiskCacheConfig(tmp_path, max_bytes=32 * MIB, shutdown_seconds=60))
    assert lives.serve(PROMPT) == [0]
    limits = "at most 32 MiB, of a prompt its first 352 tokens"
    assert lives.said[-1] == f"disk cache: {tmp_path}, {limits}"
    assert lives.serve(PROMPT) == [352]


def test_a_limit_beyond_the_longest_prompt_is_reported_as_none(model: Path, tmp_path: Path) -> None:
    lives = Lives(model, DiskCacheConfig(tmp_path, max_bytes=512 * MIB))
    assert lives.serve() == []
    assert lives.said[-1] == f"disk cache: {tmp_path}, at most 512 MiB, prompts whole"


def test_prefixes_that_are_evicted_for_lack_of_memory_go_to_disk(
    model: Path, tmp_path: Path
) -> None:
    """At once, before they would be written by themselves."""

    async def serve() -> None:
        engine = loaded(Lives(model, DiskCacheConfig(tmp_path, max_bytes=64 * MIB)).config)
        try:
            assert await _ask(engine, "first", PROMPT) == 0
            n_blocks = (await engine.stats()).cache.blocks_cached
            assert n_blocks
            evicted = await engine.give_back(0.0)
            assert (evicted, (await engine.stats()).cache.blocks_cached) == (0, n_blocks)
            assert await engine.give_back(1.0) == n_blocks
            assert (await engine.stats()).cache.blocks_cached == 0
            async with asyncio.timeout(PATIENCE):
                while not await _has_entries(engine, len(PROMPT) // 32):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        finally:
            await engine.drain(10.0)

    asyncio.run(serve())


async def _has_entries(engine: Engine, n_entries: int) -> bool:
    disk = (await engine.stats()).cache.disk
    return disk is not None and disk.entries >= n_entries


def test_what_is_on_disk_is_told_while_nothing_is_computed(model: Path, tmp_path: Path) -> None:
    async def idle() -> None:
        disk = DiskCacheConfig(tmp_path, max_bytes=64 * MIB)
        config = Lives(model, disk).config
        engine = loaded(config)
        try:
            await _ask(engine, "only", PROMPT)
            async with asyncio.timeout(PATIENCE):
                n_blocks = len(PROMPT) // config.block_size
                while not await _is_written(engine, n_blocks):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        finally:
            await engine.drain(10.0)

    asyncio.run(idle())


async def _is_written(engine: Engine, n_blocks: int) -> bool:
    disk = (await engine.stats()).cache.disk
    assert disk is not None
    return disk.entries >= n_blocks and disk.buffered_bytes == 0


def test_a_limit_that_keeps_no_prompt_is_refused_in_words(model: Path, tmp_path: Path) -> None:
    lives = Lives(model, DiskCacheConfig(tmp_path / "disk", max_bytes=16 * MIB))
    needed = "the least that is kept, 256 tokens of a prompt, needs 23 MiB"
    with pytest.raises(DiskError, match=f"16 MiB is too small for this model: {needed}"):
        lives.serve()
    assert not (tmp_path / "disk").exists()


def test_selective_writes_what_has_paused_and_the_rest_at_the_end(
    model: Path, tmp_path: Path
) -> None:
    lives = Lives(model, DiskCacheConfig(tmp_path, max_bytes=64 * MIB, shutdown_seconds=60))
    assert lives.serve(PROMPT[:300], SHORT) == [0, 0]
    assert lives.serve(PROMPT[:300], SHORT) == [288, 0]  # a prompt of 40 tokens is no matter


def test_another_version_of_mlx_lm_computes_anew(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers may be others: those of a model that it had wrong, for one."""
    lives = Lives(model, DiskCacheConfig(tmp_path, max_bytes=64 * MIB, shutdown_seconds=60))
    assert lives.serve(PROMPT[:300]) == [0]
    with monkeypatch.context() as later:
        now = metadata.version
        later.setattr(metadata, "version", lambda name: {"mlx-lm": "999"}.get(name) or now(name))
        assert lives.serve(PROMPT[:300]) == [0]
    assert lives.serve(PROMPT[:300]) == [288]


@pytest.mark.parametrize("mode", ["exit", "all"])
def test_exit_writes_at_the_end_alone_and_all_at_once(
    model: Path, tmp_path: Path, mode: str
) -> None:
    disk = DiskCacheConfig(tmp_path, 64 * MIB, DiskWrites(mode), shutdown_seconds=60.0)
    lives = Lives(model, disk)
    engine = launched(lives.config)

    async def served() -> None:
        await _ask(engine, "one", PROMPT[:300])
        if mode == "all":
            await asyncio.to_thread(until, lambda: _stored(tmp_path) >= 9 * 32 * TOKEN_BYTES)
        else:
            assert not _stored(tmp_path)
        await engine.drain(10.0)

    asyncio.run(served())
    assert lives.serve(PROMPT[:300]) == [288]


def test_a_salted_namespace_that_only_the_disk_has_is_cleared_by_its_name(
    model: Path, tmp_path: Path
) -> None:
    """Which is the one that an earlier daemon's pictures had."""
    disk = DiskCacheConfig(tmp_path, 64 * MIB, shutdown_seconds=60.0, salted=True)
    config = Lives(model, disk).config

    async def serve(forgotten: Collection[str], salts: Sequence[str]) -> tuple[list[int], str]:
        """How many tokens were cached, and the name of the salt that came last."""
        engine = loaded(config)
        try:
            for name in forgotten:
                await engine.clear_cache(name, frozenset({CacheTier.DISK}))
            cached = [await _ask(engine, salt, PROMPT[:300], salt) for salt in salts]
            seen = await engine.tree(0)
            assert isinstance(seen, TreeSnapshot)
            return cached, seen.namespaces[-1].id
        finally:
            await engine.drain(10.0)

    _, alice = asyncio.run(serve([], ["alice"]))
    assert asyncio.run(serve([], ["bob"]))[0] == [0]
    assert asyncio.run(serve([alice], ["alice", "bob"]))[0] == [0, 288]


def _stored(directory: Path) -> int:
    """Bytes of entries."""
    return sum(path.stat().st_size for path in extent_files(directory))

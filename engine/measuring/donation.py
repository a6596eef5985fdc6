"""Whether writes to the arena are in place while a step is in flight, by the arena's memory.

A write is, where MLX donates the pool's buffer to it: while nobody else refers to that. What is in
flight on a GPU may. `launch.py` says why CPUs launch a step ahead and GPUs do not; this is what its
choice rests on.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from engine.core.step import BatchEntry, Decode, Prefill, Sampling, SequenceId, StepPlan
from engine.measuring.configs import CONFIGS, VOCAB_SIZE
from engine.measuring.load_check import load
from engine.measuring.random_checkpoint import tiny_tokenizer, write_checkpoint
from engine.measuring.room import require_bytes
from engine.measuring.rounds import Figures, Sizes
from engine.mlx_backend.launch import Launch, LaunchAhead, LaunchWhenIdle
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.runner import MlxRunner
from engine.mlx_backend.sampling.sampler import Sampler
from engine.mlx_backend.storage.arena import token_bytes
from engine.mlx_backend.storage.storage import Storage
from engine.values.request import SamplingParams
from kvstore.ops import TablePatch
from kvstore.sizes import StorageSizes

BLOCK_SIZE = 8
ROWS, PROMPT_TOKENS, CHUNK_TOKENS, STEPS = 4, 40, 30, 20
ROW_BLOCKS = 100
"""Room for the chunks of the first row; the others decode."""

_ARCHITECTURE = "qwen3"


@dataclass(frozen=True, slots=True)
class InFlight:
    """Of steps that are submitted while the one before is computed."""

    pool_bytes: int  # of one layer's K
    peak_bytes: int  # above what was in use before
    seconds: float  # a step


class DonationMeasurement:
    """Both ways of launching a step, on a tiny model with large pools."""

    def __init__(self, sizes: Sizes, scratch: Path) -> None:
        self._pool_bytes = sizes.pool_bytes
        self._scratch = scratch
        self._launches: dict[str, Launch] = {
            "launched ahead": LaunchAhead(),
            "launched when idle": LaunchWhenIdle(),
        }

    def cases(self) -> Sequence[str]:
        return list(self._launches)

    def measure(self, case: str) -> Figures:
        """Raises TooLarge."""
        found = steps_in_flight(self._model(), self._launches[case])
        return {
            "pool_mib": found.pool_bytes / 2**20,
            "peak_mib": found.peak_bytes / 2**20,
            "pools_times": found.peak_bytes / found.pool_bytes,
            "step_ms": 1e3 * found.seconds,
        }

    def _model(self) -> CachedModel:
        """With pools of so many bytes."""
        with tempfile.TemporaryDirectory(dir=self._scratch) as parent:
            checkpoint = Path(parent) / "checkpoint"
            config = CONFIGS[_ARCHITECTURE]
            write_checkpoint(checkpoint, config, 0, tiny_tokenizer(), mx.float32)
            loaded, execution = load(checkpoint)
        first = loaded.layout.kv_layers[0]
        block_bytes = BLOCK_SIZE * first.kv_heads * first.key_dim * first.key_dtype.size
        n_blocks = max(self._pool_bytes // block_bytes, ROWS * ROW_BLOCKS)
        arena_bytes = n_blocks * BLOCK_SIZE * token_bytes(loaded.layout.kv_layers)
        require_bytes(2 * arena_bytes)  # were all copied
        storage = Storage(loaded.layout, StorageSizes(n_blocks), BLOCK_SIZE)
        return CachedModel(loaded.model, loaded.layout, storage, execution)


def steps_in_flight(model: CachedModel, launch: Launch) -> InFlight:
    """Steps of a chunk beside decodes, each submitted before the one before is collected."""
    runner = MlxRunner(model, Sampler(VOCAB_SIZE), launch)
    names = [SequenceId(row) for row in range(ROWS)]
    runner.submit(_prompts(names))
    runner.sample(None)
    mx.synchronize()
    mx.reset_peak_memory()
    before, started = mx.get_active_memory(), time.perf_counter()
    for step in range(STEPS):
        start = PROMPT_TOKENS + CHUNK_TOKENS * step
        chunk = Prefill(names[0], start, _tokens(CHUNK_TOKENS))
        runner.submit(StepPlan(rows=[chunk, *map(Decode, names[1:])]))
        runner.collect()
        runner.sample(None)
    runner.collect()
    return InFlight(
        pool_bytes=model.storage.full.layers[0].arrays()[0].nbytes,
        peak_bytes=mx.get_peak_memory() - before,
        seconds=(time.perf_counter() - started) / STEPS,
    )


def _prompts(names: Sequence[SequenceId]) -> StepPlan:
    """Each row's table, and the first tokens of it."""
    entry = Sampling(SamplingParams(temperature=0), seed=0)
    return StepPlan(
        enter=[BatchEntry(name, entry) for name in names],
        patches=[
            (name, TablePatch(None, 0, tuple(range(ROW_BLOCKS * name, ROW_BLOCKS * (name + 1)))))
            for name in names
        ],
        rows=[Prefill(name, 0, _tokens(PROMPT_TOKENS), samples=True) for name in names],
    )


def _tokens(n_tokens: int) -> tuple[int, ...]:
    return tuple(37 * i % VOCAB_SIZE for i in range(n_tokens))

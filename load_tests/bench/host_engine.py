"""The engine's loop over a runner that answers at once, for `load_tests.bench.host`."""

import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from engine.core.inbox import Inbox
from engine.core.loop import EngineLoop
from engine.core.metrics import Metrics
from engine.core.request import Limits, prepare
from engine.core.scheduler import Scheduler
from engine.core.step import (
    Prefill,
    Prefilled,
    Row,
    RowResult,
    Sampled,
    SampledToken,
    StepMasks,
    StepPlan,
    StepResult,
)
from engine.disk_cache.cache import DiskCache
from engine.disk_cache.loader import LoadRules
from engine.disk_cache.writer import WriteRules
from engine.drafts.policy import DraftPolicy
from engine.output.text import detokenizer_factory, output_factory
from engine.values.output import OutputEvent
from engine.values.request import Request
from kvstore.disk.store import DiskStore
from kvstore.disk.types import DiskLimits
from kvstore.pool import BlockPool
from kvstore.sizes import StorageBytes
from kvstore.store import KVStore
from kvstore.tree import RadixTree
from load_tests.tokenizer import build_tokenizer, word_ids

BLOCK_TOKENS = 32
BLOCK_BYTES = 4096
PROMPT_TOKENS = 512
MOST_STEPS = 4096
VOCABULARY = 150_000


class HostEngine:
    """Rows that decode, turned by hand. `runner_seconds`: what the runner has taken since reset."""

    def __init__(self, rows: int, disk_directory: Path | None) -> None:
        self.runner_seconds = 0.0
        self._random = random.Random(rows)
        self._words = word_ids(build_tokenizer())
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer())
        pool = BlockPool((PROMPT_TOKENS + MOST_STEPS) // BLOCK_TOKENS * (rows + 4))
        has_disk = disk_directory is not None
        tree = RadixTree(pool, BLOCK_TOKENS, time.monotonic, hashes_blocks=has_disk)
        store = KVStore(pool, tree, BLOCK_TOKENS)
        limits = Limits(
            vocab_size=VOCABULARY,
            max_context_tokens=2 * MOST_STEPS,
            arena_tokens=pool.n_blocks * BLOCK_TOKENS,
            max_running=32,
            max_waiting=1024,
            step_tokens=512,
            step_stretch=4.0,
        )
        inbox = Inbox()
        disk: DiskCache | None = None
        if disk_directory is not None:
            limits_of_tier = DiskLimits(max_bytes=1 << 30, buffer_bytes=1 << 26)
            tier = DiskStore.open(disk_directory, "host", limits_of_tier)
            part_bytes = (BLOCK_BYTES, 0)
            disk = DiskCache(
                tier, store, part_bytes, 1 << 30, inbox.post, WriteRules(), LoadRules()
            )
        self._scheduler = Scheduler(
            store,
            output_factory(frozenset(), detokenizer_factory(tokenizer)),
            limits,
            lambda: 7,
            Metrics(),
            disk=disk,
            drafts=DraftPolicy(store),
        )
        self._loop = EngineLoop(
            self._scheduler,
            self,
            inbox,
            _ignore,
            StorageBytes(block=BLOCK_BYTES, slots=(), arenas=0),
        )
        self._plans = deque[StepPlan]()
        for index in range(rows):
            prompt = tuple(self._random.choices(self._words, k=PROMPT_TOKENS))
            request = Request(f"row-{index}", prompt, MOST_STEPS, client=f"client-{index % 4}")
            self._scheduler.add(
                prepare(request, limits, block_hashes=self._scheduler.block_hashes),
                time.monotonic(),
            )
        while any(s.output_tokens == 0 for s in self._scheduler.live):
            self.turn()

    def turn(self) -> None:
        self._loop.turn()

    def close(self) -> None:
        self._loop.abort_all()
        self._loop.stop()
        self._loop.run()

    # ModelRunner

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def sample(self, masks: Callable[[], StepMasks] | None) -> None: ...

    def collect(self) -> StepResult:
        began = time.perf_counter()
        plan = self._plans.popleft()
        read = tuple((bytes(BLOCK_BYTES), None) for _ in plan.reads)
        result = StepResult(tuple(map(self._result, plan.rows)), read)
        self.runner_seconds += time.perf_counter() - began
        return result

    def _result(self, row: Row) -> RowResult:
        if isinstance(row, Prefill) and not row.samples:
            return Prefilled()
        return Sampled(SampledToken(self._random.choice(self._words)))


def _ignore(events: list[OutputEvent]) -> None:
    """The events go nowhere."""

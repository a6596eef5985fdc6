"""The ranks of one model: processes that each compute a part of every layer and keep a part of the
KV cache.

Collectives are in the model's layers, one more is for each step's tokens. Every rank must issue the
same ones in the same order, so whatever decides on forwards is agreed.
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Thread
from typing import NamedTuple
from unittest.mock import patch

import mlx.core as mx
import msgspec

from engine.api import ModelError, Report
from engine.core.step import Masks
from engine.mlx_backend.loading.division import RankMemory, rank_memory
from engine.mlx_backend.loading.memory import AgreedSizes, MemoryPlan
from engine.mlx_backend.ranks.leader import Leader
from engine.mlx_backend.ranks.link import BEAT_SECONDS, Link, RankLost, end_process
from engine.mlx_backend.ranks.plan import Frame
from engine.mlx_backend.runner import MlxRunner
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.mlx_backend.sampling.sampler import Drawn, Sampler
from engine.process.child import REPORTED_STATUS, ChildProcess
from engine.values.stats import RankStats
from kvstore.sizes import StorageSizes

_UNUSABLE = 1 << 31
"""Added to a token where a row's logits leave none to choose; all tokens are less."""

_NUMBERS = msgspec.msgpack.Decoder(tuple[str, tuple[float, ...]])


class _Limit(NamedTuple):
    """How long the step that is computed now may take. Each step has a limit of its own."""

    seconds: float


class Ranks:
    """All ranks of a model, as one of them sees them. `links` are rank 0's to the others, in order,
    or another rank's to rank 0. When one is lost this process ends.

    `n_sharing`: how many of the ranks share this machine's memory. `report` gets why this process
    ends, in words, just before it does. `children` are ranks that this process has started.
    """

    def __init__(self, rank: int, size: int, n_sharing: int, report: Report) -> None:
        self.rank = rank
        self.size = size
        self.n_sharing = n_sharing
        self.links: list[Link] = []
        self.children: list[ChildProcess] = []
        self.sent_seconds = 0.0
        self.memories: list[RankMemory] = []  # of all ranks, by rank; on rank 0, when planned
        self._report = report
        self._is_closed = False
        self._limit: _Limit | None = None
        self._group: mx.distributed.Group | None = None

    @property
    def group(self) -> mx.distributed.Group:
        """MLX's group of all ranks, once it has been formed."""
        assert self._group is not None, "the ranks' group has not been formed"
        return self._group

    def form(self, addresses: Sequence[str]) -> None:
        """Connect the ranks for collectives, each at its address. Raises ModelError."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump([[address] for address in addresses], file)
            file.flush()
            variables = {"MLX_RANK": str(self.rank), "MLX_HOSTFILE": file.name}
            with patch.dict(os.environ, variables):
                try:
                    self._group = mx.distributed.init(strict=True, backend="ring")
                except RuntimeError as error:
                    raise ModelError(f"the ranks cannot be connected: {error}") from error

    def send(self, frame: Frame, body: bytes = b"") -> None:
        """Send a frame over all links. Raises RankLost."""
        began = time.perf_counter()
        for link in self.links:
            link.send(frame, body)
        self.sent_seconds += time.perf_counter() - began

    def gather(self, what: str, *numbers: float) -> list[tuple[float, ...]]:
        """The numbers of all ranks, in order, on rank 0; none on the others. Every rank must call
        this, for the same. Raises RankLost where a rank has numbers of something else.
        """
        if self.rank:
            self.send(Frame.AGREE, msgspec.msgpack.encode((what, numbers)))
            return []
        return [numbers, *(self._numbers_from(link, what) for link in self.links)]

    def agree(self, what: str, *numbers: float) -> tuple[float, ...]:
        """The least that any rank gives of each number. Every rank must call this, for the same.
        Raises RankLost where a rank agrees on something else.
        """
        given = self.gather(what, *numbers)
        if self.rank:
            return self._numbers_from(self.links[0], what)
        least = tuple(map(min, zip(*given, strict=True)))
        self.send(Frame.AGREE, msgspec.msgpack.encode((what, least)))
        return least

    def worst(self, number: float) -> float:
        """The largest number that any rank gives; infinity if one is no number."""
        [least] = self.agree("a check", -math.inf if math.isnan(number) else -number)
        return -least

    def planned(self, plan: MemoryPlan) -> MemoryPlan:
        """A plan with the storage and the context that all ranks have memory for."""
        sizes = plan.sizes
        n_slots = [each.n_slots for each in sizes.windows]
        n_saved = 0 if sizes.states is None else sizes.states.saved
        what = f"the KV cache of weights of {plan.weight_bytes:,} bytes"  # in the same type
        context, most_keys, n_blocks, saved, *slots = self.agree(
            what, plan.context_tokens, plan.most_keys, sizes.n_blocks, n_saved, *n_slots
        )
        agreed = StorageSizes(
            int(n_blocks),
            tuple(
                replace(each, n_slots=int(least))
                for each, least in zip(sizes.windows, slots, strict=True)
            ),
            None if sizes.states is None else replace(sizes.states, saved=int(saved)),
        )
        common = replace(plan, context_tokens=int(context), agreed=AgreedSizes(agreed, most_keys))
        self.memories = [RankMemory(*each) for each in self.gather("memory", *rank_memory(common))]
        return common

    def stats(self) -> RankStats:
        """What this rank has sent. Any thread may call this."""
        sent_bytes = sum(link.sent_bytes for link in self.links)
        return RankStats(self.size, self.sent_seconds, sent_bytes)

    def sampler(self, vocab_size: int) -> Sampler:
        """The sampler of this rank."""
        return SharedSampler(vocab_size, self.group)

    def serve(self, runner: MlxRunner) -> MlxRunner | Leader:
        """The runner that serves on this rank, whose own `runner` has loaded the model. Returns
        when all have. Raises RankLost.
        """
        self.agree("the end of loading")
        for link in self.links:
            link.serve()
        if self.rank:
            return runner
        Thread(target=self._watch, name="ranks", daemon=True).start()
        return Leader(runner, self.send, self._expect)

    def lose(self, lost: RankLost) -> None:
        """End this process, since a rank is lost. Any thread may call it."""
        if not self._is_closed:
            self._end(str(lost))

    def close(self) -> None:
        """Have all other ranks end, and kill those that this one has started, also stopped ones.
        No loss is reported any more.
        """
        self._is_closed = True
        for link in self.links:
            link.close()
        for child in self.children:
            child.kill()
            child.wait()

    def _end(self, why: str) -> None:
        self._is_closed = True
        for child in self.children:
            child.kill()
        self._report(why)
        end_process(REPORTED_STATUS)

    def _expect(self, seconds: float | None) -> None:
        """Have this process end if this is not called again within `seconds`; None: no limit."""
        self._limit = None if seconds is None else _Limit(seconds)

    def _watch(self) -> None:
        """End the process when a step takes too long. Counts the seconds in which this process has
        run: it may have been suspended.
        """
        limit: _Limit | None = None
        n_beats = 0
        while limit is None or n_beats * BEAT_SECONDS < limit.seconds:
            n_beats, limit = n_beats + 1 if limit is self._limit else 0, self._limit
            time.sleep(BEAT_SECONDS)
        self._end(f"a step has taken more than {limit.seconds:g} s: a rank is lost")

    def _numbers_from(self, link: Link, what: str) -> tuple[float, ...]:
        its_what, numbers = _NUMBERS.decode(link.receive_body(Frame.AGREE))
        if its_what != what:
            raise RankLost(f"the ranks load differently: {link.name} {its_what}, this one {what}")
        return numbers


class SharedSampler(Sampler):
    """Rank 0 samples. All ranks get its tokens by a collective, and they stay on the device."""

    def __init__(self, vocab_size: int, group: mx.distributed.Group) -> None:
        super().__init__(vocab_size)
        self._group = group

    def sample(
        self, logits: mx.array, rows: Sequence[SamplingRow], masks: Masks, masked: Sequence[int]
    ) -> Drawn:
        """See `Sampler.sample`. Other ranks than 0 read neither logits nor masks."""
        if self._group.rank():
            own = mx.zeros(len(logits), mx.uint32)
            drawn = Drawn(own, own, len(rows), [])
        else:
            drawn = super().sample(logits, rows, masks, masked)
            is_usable = mx.isfinite(drawn.peaks.reshape(-1))
            own = mx.where(is_usable, drawn.tokens, drawn.tokens + _UNUSABLE)
        shared = mx.distributed.all_sum(own, group=self._group)
        peaks = mx.where(shared < _UNUSABLE, 0.0, math.inf)
        return replace(drawn, tokens=shared & (_UNUSABLE - 1), peaks=peaks)

"""The ranks of one model: processes that each compute a part of every layer and keep a part of the
KV cache.

Collectives are in the model's layers, one more is for each step's tokens. Every rank must issue the
same ones in the same order, so whatever decides on forwards is agreed.
"""

import json
import logging
import math
import os
import platform
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from threading import Lock, Thread
from typing import NamedTuple
from unittest.mock import patch

import mlx.core as mx
import msgspec
from pydantic import TypeAdapter

from engine.api import ModelError, Report
from engine.core.step import Masks, ModelRunner
from engine.mlx_backend.loading.division import refuse
from engine.mlx_backend.loading.memory import AgreedSizes, MemoryPlan
from engine.mlx_backend.ranks.link import BEAT_SECONDS, Link, RankLost, end_process
from engine.mlx_backend.ranks.plan import Frame
from engine.mlx_backend.runner import MlxRunner
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.mlx_backend.sampling.sampler import Drawn, Sampler
from engine.process.child import REPORTED_STATUS, start_child
from engine.values.settings import EngineConfig
from kvstore.sizes import StorageSizes

ANSWER_SECONDS = 1800.0
"""How long a rank may take from one agreement to the next: it reads its weights between two."""

logger = logging.getLogger(__name__)

PROTOCOL = 1
"""Changes with the frames, and with what ranks agree on."""

CONFIG = TypeAdapter(EngineConfig)

_UNUSABLE = 1 << 31
"""Added to a token where a row's logits leave none to choose; all tokens are less."""


class Setup(NamedTuple):
    """What rank 0 sends first: the rank of the receiver, and what it loads."""

    rank: int
    size: int
    config: bytes  # JSON
    checkpoint: str


class Ranks:
    """All ranks of a model, as one of them sees them.

    `links`: rank 0's to the others, in order; of another rank the one to rank 0. `children` are
    those that rank 0 has started, on its own machine. `report` gets why this rank ends.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        report: Report,
        children: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
        self.rank = rank
        self.size = size
        self.links: list[Link] = []
        self.sent_seconds = 0.0
        self._report = report
        self._children = children
        self._lock = Lock()
        self._is_waiting = False
        self._lost: RankLost | None = None
        self._due_seconds = math.inf
        self._expected = ""
        self._group: mx.distributed.Group | None = None

    @property
    def group(self) -> mx.distributed.Group:
        """MLX's group of all ranks, once it has been formed."""
        assert self._group is not None, "the ranks' group has not been formed"
        return self._group

    def form(self, hosts: Sequence[str]) -> None:
        """Connect the ranks for collectives, each at its address. Raises ModelError."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump([[address] for address in hosts], file)
            file.flush()
            variables = {"MLX_RANK": str(self.rank), "MLX_HOSTFILE": file.name}
            with patch.dict(os.environ, variables):
                try:
                    self._group = mx.distributed.init(strict=True, backend="ring")
                except RuntimeError as error:
                    raise ModelError(f"the ranks cannot be connected: {error}") from error
        if not self.rank:
            Thread(target=self._watch, name="ranks", daemon=True).start()

    def send(self, frame: Frame, body: bytes = b"") -> None:
        """Send a frame to all other ranks that this one is connected to. Raises RankLost."""
        began = time.perf_counter()
        for link in self.links:
            link.send(frame, body)
        self.sent_seconds += time.perf_counter() - began

    def agree(self, what: str, *numbers: float) -> tuple[float, ...]:
        """The least that any rank gives of each number. Every rank must call this, for the same.
        Raises RankLost if a rank is lost meanwhile, or agrees on something else.
        """
        own = msgspec.msgpack.encode((what, numbers))
        with self.waiting():
            if self.rank:
                self.send(Frame.AGREE, own)
                return self._numbers(self.links[0].receive(ANSWER_SECONDS), what)
            others = [self._numbers(link.receive(ANSWER_SECONDS), what) for link in self.links]
            least = tuple(map(min, zip(numbers, *others, strict=True)))
            self.send(Frame.AGREE, msgspec.msgpack.encode((what, least)))
            return least

    def worst(self, number: float) -> float:
        """The largest number that any rank gives; infinity if one is no number."""
        [least] = self.agree("a check", -math.inf if math.isnan(number) else -number)
        return -least

    def planned(self, plan: MemoryPlan) -> MemoryPlan:
        """A plan with the storage and the context that all ranks have memory for."""
        sizes = plan.sizes
        windows = [each.n_slots for each in sizes.windows]
        saved = 0 if sizes.states is None else sizes.states.saved
        context, most_keys, n_blocks, saved, *windows = self.agree(
            "the KV cache", plan.context_tokens, plan.most_keys, sizes.n_blocks, saved, *windows
        )
        agreed = StorageSizes(
            int(n_blocks),
            tuple(
                replace(each, n_slots=int(n_slots))
                for each, n_slots in zip(sizes.windows, windows, strict=True)
            ),
            None if sizes.states is None else replace(sizes.states, saved=int(saved)),
        )
        return replace(plan, context_tokens=int(context), agreed=AgreedSizes(agreed, most_keys))

    def sampler(self, vocab_size: int) -> Sampler:
        """The sampler of this rank."""
        return SharedSampler(vocab_size, self.group)

    def serve(self, runner: MlxRunner) -> tuple[ModelRunner, Callable[[], None]]:
        """The model is loaded on this rank. Returns the runner that serves on it when all have
        loaded it, and what is to be called while it rests; see `Backend`. Raises RankLost.
        """
        from engine.mlx_backend.ranks.leader import Leader  # noqa: PLC0415 - it uses this module

        self.agree("the end of loading")
        for link in self.links:
            link.serve()
        if self.rank:
            return runner, runner.grow_ahead
        leader = Leader(runner, self)
        return leader, leader.rest

    def expect(self, seconds: float | None, what: str) -> None:
        """End this process if this is not called again within `seconds`; None: no limit."""
        self._due_seconds = math.inf if seconds is None else time.monotonic() + seconds
        self._expected = f"{what} has taken more than {seconds} s"

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within the context a rank that is lost raises RankLost. Elsewhere it ends the process."""
        with self._lock:
            self._is_waiting = True
        try:
            yield
        finally:
            with self._lock:
                self._is_waiting = False
                lost = self._lost
        if lost is not None:
            raise lost

    def lose(self, lost: RankLost) -> None:
        """A rank is lost. Called by its link."""
        with self._lock:
            self._lost = lost
            if self._is_waiting:
                return
        self.end(str(lost))

    def end(self, why: str) -> None:
        """End this process and all that it has started, for a reason in words."""
        self._report(why)
        self.close()
        end_process(REPORTED_STATUS)

    def close(self) -> None:
        """Kill the ranks that this one has started, also those that are stopped."""
        for child in self._children:
            child.kill()

    def _watch(self) -> None:
        while time.monotonic() < self._due_seconds:
            time.sleep(BEAT_SECONDS)
        self.end(self._expected)

    def _numbers(self, frame: bytes, what: str) -> tuple[float, ...]:
        its_what, numbers = msgspec.msgpack.decode(frame[1:], type=tuple[str, tuple[float, ...]])
        if frame[0] != Frame.AGREE or its_what != what:
            raise RankLost(f"the ranks load differently: one is at {its_what}, one at {what}")
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


class Facts(NamedTuple):
    """What all ranks must have in common."""

    protocol: int
    mlx: str
    mlx_lm: str
    device: str


def own_facts() -> Facts:
    """Of this process."""
    kind = "cpu" if mx.default_device() == mx.cpu else "gpu"
    versions = [metadata.version(name) for name in ("mlx", "mlx-lm")]
    return Facts(PROTOCOL, *versions, f"{kind} {platform.machine()}")


def compare_facts(own: Facts, frame: bytes, name: str) -> None:
    """Raise ModelError where a rank's frame has other facts."""
    its = msgspec.msgpack.decode(_body(frame, Frame.FACTS, name), type=Facts)
    for field, mine, other in zip(Facts._fields, own, its, strict=True):
        if mine != other:
            raise ModelError(f"{name} has {field} {other}, and rank 0 has {mine}")


def start_ranks(config: EngineConfig, checkpoint: Path, report: Report) -> Ranks:
    """Start the other ranks of a model on this machine, and connect all. Raises ModelError."""
    refuse(config)
    report(f"starting {config.ranks - 1} more ranks on this machine…")
    children = list[subprocess.Popen[bytes]]()
    ranks = Ranks(0, config.ranks, report, children)
    try:
        with ranks.waiting():
            for rank in range(1, config.ranks):
                connection, process = start_child("engine.mlx_backend.rank")
                children.append(process)
                ranks.links.append(Link(connection, f"rank {rank}", ranks.lose))
            settings = CONFIG.dump_json(config)
            for rank, link in enumerate(ranks.links, 1):
                setup = Setup(rank, config.ranks, settings, str(checkpoint))
                link.send(Frame.SETUP, msgspec.msgpack.encode(setup))
            for link in ranks.links:
                compare_facts(own_facts(), link.receive(ANSWER_SECONDS), link.name)
            hosts = [f"127.0.0.1:{port}" for port in _free_ports(config.ranks)]
            ranks.send(Frame.FORM, msgspec.msgpack.encode(hosts))
        ranks.form(hosts)
    except BaseException:
        ranks.close()
        raise
    return ranks


def join_ranks(link: Link) -> tuple[Ranks, Setup]:
    """Connect this rank with all others, as rank 0 sets it up. Raises ModelError."""
    frame = link.receive(ANSWER_SECONDS)
    setup = msgspec.msgpack.decode(_body(frame, Frame.SETUP, link.name), type=Setup)
    link.send(Frame.FACTS, msgspec.msgpack.encode(own_facts()))
    ranks = Ranks(setup.rank, setup.size, logger.error)
    ranks.links.append(link)
    frame = link.receive(ANSWER_SECONDS)
    hosts = msgspec.msgpack.decode(_body(frame, Frame.FORM, link.name), type=list[str])
    ranks.form(hosts)
    return ranks, setup


def _body(frame: bytes, kind: Frame, name: str) -> bytes:
    """The body of a frame of a kind. Raises RankLost for another."""
    if frame[0] != kind:
        raise RankLost(f"{name} sends a frame of kind {frame[0]} in place of {kind.name}")
    return frame[1:]


def _free_ports(n: int) -> list[int]:
    """Ports of this machine that were free just now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports

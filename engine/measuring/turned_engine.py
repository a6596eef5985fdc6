"""The daemon's engine but for its thread, turned by hand. Imports MLX: `load_blas` comes before."""

import itertools
import random
import time
from dataclasses import dataclass, replace

from engine.build import assemble
from engine.core.inbox import Inbox
from engine.core.request import prepare
from engine.core.step import Backend
from engine.measuring.bare import BareModel
from engine.measuring.opened import MeasuredModel, wait_for_device
from engine.values.output import OutputEvent
from engine.values.request import Request, SamplingParams
from engine.values.settings import EngineConfig
from engine.values.stats import MemoryStats

MAX_TOKENS = 2048  # more than any row says
GREEDY = SamplingParams(temperature=0.0)


class TurnedEngine:
    """Requests of random tokens, which share nothing, and steps that are timed."""

    def __init__(self, backend: Backend, config: EngineConfig) -> None:
        self._events: list[OutputEvent] = []
        parts = assemble(backend, config, _silent, Inbox(), self._events.extend)
        self._loop, self._limits = parts.loop, parts.limits
        self._vocab_size = parts.card.vocab_size
        self._longest = parts.card.max_sequence_tokens
        self._memory = backend.memory
        self._names = itertools.count()

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that there can be."""
        return self._longest

    def begin(self, rows: int, prompt_tokens: int, max_tokens: int = MAX_TOKENS) -> None:
        """Abort what runs, and turn until each of so many new requests has said something.

        Raises RuntimeError where one fails.
        """
        self._loop.abort_all()
        while not self._loop.is_idle:
            self._loop.turn()
        self._events.clear()
        prompts = [self.unique_prompt(prompt_tokens) for _ in range(rows)]
        self.wait_for({self.submit(prompt, max_tokens) for prompt in prompts})

    def unique_prompt(self, n_tokens: int) -> tuple[int, ...]:
        """Of random tokens, as no other one."""
        return tuple(random.Random(next(self._names)).choices(range(self._vocab_size), k=n_tokens))

    def submit(self, prompt: tuple[int, ...], max_tokens: int) -> str:
        """The request's name."""
        request = Request(f"r{next(self._names)}", prompt, max_tokens, GREEDY, ignore_eos=True)
        self._loop.scheduler.add(prepare(request, self._limits), time.monotonic())
        return request.id

    def wait_for(self, names: set[str]) -> None:
        """Turn until each of these requests has said something. Raises RuntimeError where a step
        fails.
        """
        while names:
            self._loop.turn()
            if errors := [event.error for event in self._events if event.error]:
                raise RuntimeError(errors[0])
            names -= {event.request_id for event in self._events if event.token_ids}

    def copied_blocks(self) -> int:
        """Blocks that were copied because a prompt goes on within one that it found."""
        return self._loop.scheduler.store.counters.prefix_copies

    def memory(self) -> MemoryStats:
        return self._memory()

    def turn(self, steps: int) -> float:
        """Seconds until so many steps have been taken, and the device has nothing left to do."""
        start = time.perf_counter()
        for _ in range(steps):
            self._loop.turn()
        wait_for_device()  # a step that was launched ahead is this round's
        return time.perf_counter() - start

    def seconds(self, steps: int) -> float:
        """For each row to say so many tokens. Raises RuntimeError where one does not."""
        said = sum(len(event.token_ids) for event in self._events)
        rows = len(self._loop.scheduler.live)
        seconds = self.turn(steps)
        told = sum(len(event.token_ids) for event in self._events) - said
        if told != rows * steps:
            raise RuntimeError(f"{rows} rows said {told} tokens in {steps} steps")
        return seconds


@dataclass(frozen=True, slots=True)
class EngineBeside:
    """An engine, and mlx-lm's model over the same weights."""

    engine: TurnedEngine
    bare: BareModel


def open_engine(config: EngineConfig, rows: int, row_tokens: int) -> EngineBeside:
    """Load the configured model, with room for so many rows of so many tokens.

    Raises ModelError.
    """
    opened = MeasuredModel(config)
    # The first rows say little while the others' prompts come, and each row a token a step.
    config = replace(
        config, max_running=max(rows, 1), max_prompt_share=1.0, speculate="off", disk=None
    )
    config = replace(config, kv_cache_bytes=opened.kv_bytes(config, rows, row_tokens))
    return EngineBeside(TurnedEngine(opened.backend(config, _silent), config), opened.bare())


def _silent(line: str) -> None:
    """Nobody reads how loading goes."""

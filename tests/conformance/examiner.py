"""Serves a model through the real scheduler and store, and asks mlx-lm about all that it says."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from mlx.nn.layers.base import Module

from engine.mlx_backend.cpu.cascade import CascadeAttention
from engine.mlx_backend.model.attention import Attention
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from tests.devices import strategies, tolerance
from tests.golden.driving import NEAR_TIE, Driver, Logits, random_tokens, reference, shortfall
from tests.offline import OfflineDaemon, Room, Served

PROMPT_TOKENS = (1, 5, 8, 19, 33, 47)
OUTPUT_TOKENS = 24
ERROR_TOLERANCE = tolerance(1e-4)
"""Of logits, relative to their size. Models that are right stay below 2e-5."""

Prompts: TypeAlias = Mapping[str, list[int]]
Answers: TypeAlias = Mapping[str, Sequence[int]]


class Examiner:
    """What is wrong with how a model is served gathers in `problems`, in words."""

    def __init__(self, served: Served, peer: Module) -> None:
        self.problems: list[str] = []
        self._served = served
        self._peer = peer

    def examine(self) -> None:
        """All but the logits, by what the users of a daemon see."""
        self._conversations()
        self._shared_prefix()
        self._two_choices()
        self._preemption()

    def largest_error(self) -> float:
        """Of logits after chunks and decodes of ragged rows, relative to each token's logits."""
        driver = Driver(self._served, _attention())
        rows = [random_tokens(n + 6, seed=300 + n) for n in PROMPT_TOKENS]
        found = driver.logits([driver.subject(tokens) for tokens in rows], lasts=6)
        errors = [
            _relative_error(logits, reference(self._peer, tokens)[-len(logits) :])
            for logits, tokens in zip(found, rows, strict=True)
        ]
        return float(np.max(errors))

    def _conversations(self) -> None:
        """Ragged prompts at once: cold, warm, and their next turns."""
        daemon = self._daemon(n_blocks=256)
        prompts = {f"cold{n}": random_tokens(n, seed=n) for n in PROMPT_TOKENS}
        answers = self._ask(daemon, prompts)
        again = {f"warm of {name}": prompt for name, prompt in prompts.items()}
        self._ask(daemon, again)
        for name, prompt in again.items():
            self._expect_cached(daemon, name, len(prompt) - 1, len(prompt) - 1)
        following = {
            f"after {name}": [*prompt, *answers[name], *random_tokens(4, seed=60)]
            for name, prompt in prompts.items()
        }
        retold = {
            f"retold {name}": [*prompt, *random_tokens(12, seed=70)]
            for name, prompt in prompts.items()
        }
        self._ask(daemon, following | retold)
        for name, prompt in prompts.items():
            said_tokens = len(prompt) + OUTPUT_TOKENS - 1
            self._expect_cached(daemon, f"after {name}", said_tokens, said_tokens)
            self._expect_cached(daemon, f"retold {name}", len(prompt), len(prompt) + 12)

    def _shared_prefix(self) -> None:
        """Four at once: all but the first find whole blocks of what they begin with."""
        daemon = self._daemon(n_blocks=96)
        system = random_tokens(29, seed=80)
        prompts = {f"end{i}": system + random_tokens(3 + i, seed=81 + i) for i in range(4)}
        self._ask(daemon, prompts)
        by_hits = sorted(prompts, key=lambda name: daemon.usage[name].cached_tokens)
        for name in by_hits[1:]:
            self._expect_cached(daemon, name, 24, len(prompts[name]) - 1)

    def _two_choices(self) -> None:
        prompt = random_tokens(21, seed=90)
        daemon = self._daemon(n_blocks=64)
        said = daemon.serve(_request("choices", prompt, n=2))
        for index in range(2):
            self._expect_greedy(f"choice {index}", prompt, said["choices", index])

    def _preemption(self) -> None:
        daemon = self._daemon(n_blocks=16)
        self._ask(daemon, {f"tight{i}": random_tokens(17 + 3 * i, seed=10 + i) for i in range(4)})
        if daemon.scheduler.metrics.preemptions == 0:
            self.problems.append("nothing was preempted")

    def _ask(self, daemon: OfflineDaemon, prompts: Prompts) -> Answers:
        """All prompts at once, and each answer compared with mlx-lm's."""
        said = daemon.serve(*(_request(name, prompt) for name, prompt in prompts.items()))
        for name, prompt in prompts.items():
            self._expect_greedy(name, prompt, said[name, 0])
        return {name: said[name, 0] for name in prompts}

    def _expect_greedy(self, name: str, prompt: list[int], said: Sequence[int]) -> None:
        """Each token is mlx-lm's best after those before it, or as good as that."""
        if len(said) != OUTPUT_TOKENS:
            self.problems.append(f"{name}: {len(said)} tokens instead of {OUTPUT_TOKENS}")
        elif not (lacking := shortfall(self._peer, prompt, said)) < NEAR_TIE:
            self.problems.append(f"{name}: a token is {lacking:.2g} below mlx-lm's best")

    def _expect_cached(self, daemon: OfflineDaemon, name: str, least: int, most: int) -> None:
        cached_tokens = daemon.usage[name].cached_tokens
        if not least <= cached_tokens <= most:
            self.problems.append(f"{name}: {cached_tokens} tokens cached, not {least} to {most}")

    def _daemon(self, n_blocks: int) -> OfflineDaemon:
        room = Room(n_blocks, max_running=12, spare=64)
        return OfflineDaemon(self._served, _attention(), room)


def _attention() -> Attention:
    """What attends most unlike mlx-lm of what this device serves with."""
    on_cpu = "cascade" in strategies()
    return CascadeAttention(min_saved_blocks=1) if on_cpu else Attention()


def _request(name: str, prompt: list[int], n: int = 1) -> Request:
    return Request(name, pack(prompt), OUTPUT_TOKENS, SamplingParams(temperature=0), n=n)


def _relative_error(found: Logits, expected: Logits) -> float:
    """The largest of all tokens; what is ruled out by -inf counts not. `[tokens, vocabulary]`."""
    finite = np.isfinite(expected)
    error = np.where(finite, found - expected, 0)
    size = np.linalg.norm(np.where(finite, expected, 0), axis=1)
    return float((np.linalg.norm(error, axis=1) / size).max())

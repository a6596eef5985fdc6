"""Scheduler, store and runner together on real models: what is said never depends on the rest."""

from collections import defaultdict

import numpy as np
from mlx.nn.layers.base import Module

from engine.mlx_backend.attention.strategy import Attention
from engine.mlx_backend.loader import LoadedModel
from engine.mlx_backend.runner import MlxRunner
from engine.mlx_backend.sampler import Sampler
from engine.output import OutputFactory
from engine.scheduler import Scheduler
from engine.sharing import WaitForTwins
from engine.types import Request, SamplingParams, Usage
from engine.validation import Limits
from kvstore import invariants
from kvstore.arena import Arena
from kvstore.block_pool import BlockPool
from kvstore.radix_tree import RadixTree
from kvstore.store import KVStore
from tests.checkpoints import VOCAB_SIZE
from tests.golden.driving import random_tokens, reference
from tests.simulation.simulator import LetterDetokenizer

BLOCK_SIZE = 8
OUTPUT_TOKENS = 24
NEAR_TIE = 1e-3
"""Logits closer than this may be ranked otherwise when other rows are computed beside them."""


class Daemon:
    """An engine without threads: requests in, all their tokens out."""

    def __init__(self, loaded: LoadedModel, attention: Attention, n_blocks: int) -> None:
        arena = Arena(loaded.layers, loaded.dtype, n_blocks, BLOCK_SIZE)
        self.runner = MlxRunner(loaded.model, arena, attention, Sampler(VOCAB_SIZE))
        self.pool = BlockPool(n_blocks)
        self.store = KVStore(self.pool, RadixTree(self.pool, BLOCK_SIZE), BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.store,
            WaitForTwins(BLOCK_SIZE),
            OutputFactory(frozenset(), LetterDetokenizer),
            Limits(VOCAB_SIZE, 512, n_blocks * BLOCK_SIZE, 8, 64, 32),
            draw_seed=lambda: 0,
        )
        self.usage: dict[str, Usage] = {}

    def serve(self, *requests: Request) -> dict[tuple[str, int], list[int]]:
        """Tokens by request id and index, all requests at once."""
        said = defaultdict[tuple[str, int], list[int]](list)
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work:
            plan = self.scheduler.plan()
            for event in self.scheduler.commit(plan, self.runner.run(plan)):
                assert event.error is None
                said[event.request_id, event.index] += event.token_ids
                if event.usage and event.index == 0:
                    self.usage[event.request_id] = event.usage
            invariants.check(self.store)
        return said


def request(name: str, prompt: list[int], n: int = 1) -> Request:
    return Request(name, tuple(prompt), OUTPUT_TOKENS, SamplingParams(temperature=0), n=n)


def expect_greedy(peer: Module, prompt: list[int], said: list[int]) -> None:
    """Each token is the best of mlx-lm's own logits after those before it, or as good as that."""
    assert len(said) == OUTPUT_TOKENS
    logits = reference(peer, [*prompt, *said])[len(prompt) - 1 : -1]
    best = logits.max(axis=1)
    chosen = np.take_along_axis(logits, np.array(said)[:, None], axis=1)[:, 0]
    assert (best - chosen).max() < NEAR_TIE


def test_cold_warm_and_continued(loaded: LoadedModel, peer: Module, attention: Attention) -> None:
    daemon = Daemon(loaded, attention, n_blocks=64)
    prompt = random_tokens(45, seed=1)
    cold = daemon.serve(request("cold", prompt))["cold", 0]
    warm = daemon.serve(request("warm", prompt))["warm", 0]
    longer = prompt + cold + random_tokens(5, seed=2)
    following = daemon.serve(request("following", longer))["following", 0]
    for said, after in ((cold, prompt), (warm, prompt), (following, longer)):
        expect_greedy(peer, after, said)
    assert daemon.usage["warm"].cached_tokens == 44
    assert daemon.usage["following"].cached_tokens == 45 + OUTPUT_TOKENS - 1


def test_preempted_and_brought_back(
    loaded: LoadedModel, peer: Module, attention: Attention
) -> None:
    daemon = Daemon(loaded, attention, n_blocks=16)
    prompts = {f"r{i}": random_tokens(17 + 3 * i, seed=10 + i) for i in range(4)}
    said = daemon.serve(*(request(name, prompt) for name, prompt in prompts.items()))
    assert daemon.scheduler.counters.preemptions > 0
    for name, prompt in prompts.items():
        expect_greedy(peer, prompt, said[name, 0])


def test_forked_outputs_of_one_prompt(
    loaded: LoadedModel, peer: Module, attention: Attention
) -> None:
    daemon = Daemon(loaded, attention, n_blocks=64)
    prompt = random_tokens(21, seed=20)
    said = daemon.serve(request("forked", prompt, n=3))
    assert daemon.store.counters.cow_copies > 0
    for index in range(3):
        expect_greedy(peer, prompt, said["forked", index])


def test_twins_that_diverge_inside_a_block(
    loaded: LoadedModel, peer: Module, attention: Attention
) -> None:
    daemon = Daemon(loaded, attention, n_blocks=96)
    system = random_tokens(29, seed=30)
    prompts = {f"r{i}": system + random_tokens(3 + i, seed=31 + i) for i in range(6)}
    said = daemon.serve(*(request(name, prompt) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        expect_greedy(peer, prompt, said[name, 0])
    cached = sum(daemon.usage[name].cached_tokens for name in prompts)
    assert cached >= 5 * (len(system) - len(system) % BLOCK_SIZE)

"""Random requests in random company, in each KV format: each says what it says alone and cold.

A seed draws an engine (its blocks, its attention, how it decodes) and requests, whose prompts begin
alike, with drafts, adapters and forks. Some go on where others ended, in a second engine that finds
on disk what the first one has left.
"""

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import pytest

from engine.core.inbox import Inbox
from engine.mlx_backend.cpu import cascade, products, tiles
from engine.mlx_backend.cpu.cascade import CascadeAttention
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.runner import Launch
from engine.values.output import TokenLogprob
from engine.values.request import Request, SamplingParams
from engine.values.settings import KVFormat
from engine.values.tokens import pack
from kvstore.ops import FillBlock
from kvstore.types import BlockId
from measuring.random_checkpoint import CONFIGS, VOCAB_SIZE
from tests.checkpoints import Family, write_family
from tests.devices import cpu_attention
from tests.golden.compiling import ROUNDED_TOLERANCES, compile_as_served, compile_at_once
from tests.golden.test_adapters import adapter_configs
from tests.golden.test_restarts import disk_cache
from tests.offline import OfflineDaemon, Room, Served, load
from tests.unit.scripted_drafter import ScriptedDrafter

SEEDS = (2, 4, 5)
"""Short blocks in an arena that grows, compiled; eager, poisoned; long prompts, poisoned."""

CONTEXT = 2048
GREEDY = SamplingParams(temperature=0, top_logprobs=8)

SIZES: tuple[tuple[ModuleType, str, int], ...] = (
    (cascade, "PASS_BLOCKS", 1),
    (cascade, "TWO_STREAM_NUMBERS", 1),
    (cascade, "SHORT_TOKENS", 1),
    (tiles, "TILE_KEYS", 64),
    (tiles, "TWO_STREAM_SCORES", 1),
    (products, "WIDENED", 1 << 12),
    (products, "MOST_IN_PLACE", 0),
)
"""Limits from which attention is computed in another way, and values that few tokens reach."""

Answer: TypeAlias = tuple[Sequence[int], Sequence[TokenLogprob]]
Answers: TypeAlias = dict[tuple[str, int], Answer]
"""By request id and index."""


def served_in(kv_format: KVFormat, architecture: str, adapted: bool, parent: Path) -> Served:
    config = {**CONFIGS[architecture], "max_position_embeddings": CONTEXT, "head_dim": 64}
    checkpoint = write_family(Family(architecture, config), parent)
    adapters = adapter_configs(checkpoint, parent) if adapted else ()
    return load(checkpoint, adapters=adapters, kv_format=kv_format)


class Company:
    """The engines and the requests of a seed."""

    def __init__(self, served: Served, seed: int, directory: Path) -> None:
        self.draw = draw = random.Random(seed)
        self.served = served
        self._directory = directory
        self._longest = draw.choice((40, 150, 900))
        size = draw.choice((8, 32, 32))
        n_blocks = (self._longest + draw.choice((300, 4000))) // size
        self._room = Room(
            n_blocks,
            size,
            max_running=draw.choice((4, 12)),
            step_tokens=draw.choice((16, 160, 600)),
            first_blocks=draw.choice((None, n_blocks // 3 + 1)),
        )
        self._decode = draw.choice((None, compile_at_once, compile_as_served))
        self._launch = draw.choice(list(Launch))
        ample = Room(8000 // size, size, step_tokens=512)
        self._alone = OfflineDaemon(served, CascadeAttention(), ample)

    def tokens(self, n_tokens: int) -> tuple[int, ...]:
        return tuple(self.draw.randrange(3, VOCAB_SIZE) for _ in range(n_tokens))

    def requests(self) -> list[Request]:
        draw, adapters = self.draw, ("", *self.served.loaded.adapters)
        prefixes = [self.tokens(draw.randint(1, self._longest)) for _ in range(2)]
        found = list[Request]()
        for at in range(10):
            prefix, n = draw.choice(prefixes), draw.choice((1, 1, 1, 2))
            shared = prefix[: draw.choice((0, len(prefix), draw.randint(1, len(prefix))))]
            prompt = (*shared, *self.tokens(draw.randint(1, 50)))
            sampling = replace(GREEDY, temperature=n - 1, seed=at)  # forks say different things
            found.append(
                Request(
                    f"r{at}",
                    pack(prompt),
                    draw.choice((1, 24, 60)),
                    sampling,
                    ignore_eos=True,
                    n=n,
                    adapter=draw.choice(adapters),
                )
            )
        return found

    def next_turns(self, requests: Sequence[Request], answers: Answers) -> list[Request]:
        """Some requests once more, or with their answers and more tokens."""
        turns = list[Request]()
        for request in self.draw.sample(requests, 6):
            prompt = request.prompt
            if self.draw.random() < 0.6:
                prompt = pack((*prompt, *answers[request.id, 0][0], *self.tokens(9)))
            turns.append(replace(request, id=f"{request.id} again", prompt=prompt))
        return turns

    def answers_alone(self, requests: Sequence[Request]) -> Answers:
        found: Answers = {}
        for request in requests:
            said = self._alone.serve(replace(request, cache_salt=request.id))
            assert self._alone.usage[request.id].cached_tokens == 0
            found |= {name: (said[name], self._alone.logprobs[name]) for name in said}
        return found

    def engine(self) -> OfflineDaemon:
        """An engine whose blocks hold what broken requests may have left: NaN in any format."""
        inbox, attention = Inbox(), CascadeAttention(self.draw.choice((1, 20)))
        made = OfflineDaemon(
            self.served,
            attention,
            self._room,
            disk=disk_cache(self._directory, inbox),
            inbox=inbox,
            launch=self._launch,
            decode=self._decode,
        )
        if self._room.first_blocks is None:
            poison(made.storage)
        return made

    def answers_of(
        self, engine: OfflineDaemon, requests: Sequence[Request], alone: Answers
    ) -> Answers:
        """What the engine says to all together. Half of the drafts are right."""
        said = defaultdict[tuple[str, int], list[int]](list)
        for request in requests:
            engine.add(request)
            if request.n == 1 and self.draw.random() < 0.5:
                script = [
                    (token + (at % 7 == 3)) % VOCAB_SIZE
                    for at, token in enumerate(alone[request.id, 0][0])
                ]
                engine.speculate(request.id, ScriptedDrafter(script))
            engine.step(self.draw.choice((0, 1, 5)), said)
        while not engine.loop.is_idle:
            engine.step(1, said)
            time.sleep(0)  # readers of the disk are threads
        engine.loop.stop()
        engine.loop.run()
        return {name: (tokens, engine.logprobs[name]) for name, tokens in said.items()}


def poison(storage: Storage) -> None:
    """Fill all blocks with bytes of which each pair is NaN in float16, and each four in float32."""
    for group, arena in zip((None, 0), (storage.full, *storage.windows), strict=False):
        data = bytes([255]) * storage.part_bytes[0 if group is None else 1]
        blocks = map(BlockId, range(arena.n_blocks))
        storage.execute(FillBlock(block, data, group) for block in blocks)


def expect_near(found: Answer, expected: Answer, is_greedy: bool, near: float) -> None:
    """Log-probabilities are nearly the same, and most hardly differ, up to where two tokens are
    nearly as likely.
    """
    assert len(found[0]) == len(expected[0])
    differences = [0.0]
    for ours, alone in zip(found[1], expected[1], strict=True):
        if ours.token_id != alone.token_id:
            likelihood = dict(alone.top).get(ours.token_id, -math.inf)
            assert not is_greedy or alone.logprob - likelihood < 2 * near
            break
        differences.append(abs(ours.logprob - alone.logprob))
    assert max(differences) < near
    assert statistics.median(differences) < near / 10


CASES = [
    *((kv_format, "qwen3", False) for kv_format in ROUNDED_TOLERANCES),
    (KVFormat.Q8, "olmo3", False),  # windows
    (KVFormat.K8V4, "falcon_h1", False),  # recurrent layers
    (KVFormat.Q8, "llama", True),
]


@pytest.mark.slow
@cpu_attention
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kv_format", "architecture", "adapted"), CASES)
def test_in_company_a_request_says_what_it_says_alone(
    kv_format: KVFormat,
    architecture: str,
    adapted: bool,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = served_in(kv_format, architecture, adapted, tmp_path)
    company = Company(served, seed, tmp_path / "disk")
    first = company.requests()
    alone = company.answers_alone(first)
    second = company.next_turns(first, alone)
    alone |= company.answers_alone(second)
    for module, name, small in SIZES:
        if company.draw.random() < 0.5:
            monkeypatch.setattr(module, name, small)
    for requests in (first, second):
        engine = company.engine()
        found = company.answers_of(engine, requests, alone)
        near = ROUNDED_TOLERANCES[kv_format] * (1 + adapted)
        for request in requests:
            for answer in ((request.id, index) for index in range(request.n)):
                expect_near(found[answer], alone[answer], request.n == 1, near)
    assert served.layout.states or any(usage.cached_tokens for usage in engine.usage.values())

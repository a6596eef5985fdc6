"""What is pooled are the hidden states that mlx-lm's own model has, however the steps go."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.nn.layers.base import Module

from engine.mlx_backend.model.attention import Attention
from engine.values.request import Pooling, Request, SamplingParams
from engine.values.tokens import pack
from tests.devices import tolerance
from tests.golden.conftest import ATTENTION
from tests.golden.driving import random_tokens
from tests.offline import OfflineDaemon, Room, Served

TOLERANCE = tolerance(1e-4)

Hidden = npt.NDArray[np.float32]

GATHERED = ("llama", "qwen3_4bit", "gemma3_text", "qwen3_next", "falcon_h1")
"""With weights of four bits, windows, and recurrent states."""

POOLED = [
    *((family, name) for family in GATHERED for name in ("gather", "paged")),
    *(
        (family, "cascade")
        for family in ("llama", "qwen3", "gemma3_text", "deepseek_v3")
        if "cascade" in ATTENTION
    ),
]


@pytest.fixture(params=POOLED, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    family, attention = request.param
    return family, attention


def hidden(peer: Module, tokens: list[int]) -> Hidden:
    """Behind the last norm, by mlx-lm's body of the model, `[tokens, dimensions]`."""
    return np.array(peer.model(mx.array([tokens]))[0].astype(mx.float32))


def text(name: str, tokens: list[int], pooling: Pooling, shared_tokens: int = 0) -> Request:
    return Request(name, pack(tokens), 0, pooling=pooling, shared_tokens=shared_tokens)


def expect(found: Hidden, expected: Hidden) -> None:
    assert found.dtype == np.float32
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < TOLERANCE


def test_last_mean_and_first(served: Served, peer: Module, attention: Attention) -> None:
    """In chunks, side by side, and beside a chat."""
    tokens = {way: random_tokens(45 + 7 * i, seed=i) for i, way in enumerate(Pooling)}
    daemon = OfflineDaemon(served, attention, Room(96))
    chat = Request("chat", pack(random_tokens(20, seed=9)), 12, SamplingParams(temperature=0))
    said = daemon.serve(chat, *(text(way, tokens[way], way) for way in Pooling))
    assert len(said["chat", 0]) == 12
    own = {way: hidden(peer, tokens[way]) for way in Pooling}
    expect(daemon.vectors[Pooling.LAST], own[Pooling.LAST][-1])
    expect(daemon.vectors[Pooling.MEAN], own[Pooling.MEAN].mean(axis=0))
    expect(daemon.vectors[Pooling.FIRST], own[Pooling.FIRST][0])


def test_shared_against_fresh(served: Served, peer: Module, attention: Attention) -> None:
    instruction = random_tokens(40, seed=1)
    texts = {f"t{i}": [*instruction, *random_tokens(5 + 3 * i, seed=2 + i)] for i in range(6)}
    daemon = OfflineDaemon(served, attention, Room(128))
    daemon.serve(*(text(name, one, Pooling.LAST, 40) for name, one in texts.items()))
    for name, one in texts.items():
        expect(daemon.vectors[name], hidden(peer, one)[-1])
    assert sum(daemon.usage[name].cached_tokens for name in texts) == 5 * len(instruction)


@pytest.mark.parametrize("attention_name", ATTENTION)
def test_batched_against_alone(served_of: Callable[[str], Served], attention_name: str) -> None:
    served = served_of("llama")
    texts = {f"t{i}": random_tokens(3 + 4 * i, seed=i) for i in range(8)}
    together = OfflineDaemon(served, ATTENTION[attention_name](), Room(128))
    together.serve(*(text(name, one, Pooling.LAST) for name, one in texts.items()))
    for name, one in texts.items():
        alone = OfflineDaemon(served, ATTENTION[attention_name](), Room(32))
        alone.serve(text(name, one, Pooling.LAST))
        expect(together.vectors[name], alone.vectors[name])

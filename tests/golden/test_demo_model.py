"""The embedded model has wide margins: here the tokens themselves must be those of mlx-lm."""

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from transformers import AutoTokenizer

from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from engine.mlx_backend.model.attention import Attention
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from tests.golden.conftest import ATTENTION
from tests.golden.driving import reference
from tests.offline import OfflineDaemon, Room, Served, load

pytestmark = pytest.mark.slow

MARGIN = 0.5
"""Between the best logit and the next: what another order of arithmetic changes is a thousandth."""

QUESTIONS = (
    "What is Rootstock?",
    "How does the cache work?",
    "Repeat: Laura painted 42 wooden boats in Lisbon.",
    "My name is Teodora.",
    "What day is it?",
)
SYSTEM = "You are Rootstock's demonstration model."
OUTPUT_TOKENS = 96

Answers = Mapping[str, Sequence[int]]


@pytest.fixture(scope="module")
def prompts() -> Answers:
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_CHECKPOINT)
    return {
        question: tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in QUESTIONS
    }


@pytest.fixture(scope="module")
def demo() -> Served:
    return load(DEFAULT_CHECKPOINT)


@pytest.fixture(scope="module")
def peer(demo: Served) -> Module:
    """The model as mlx-lm loads it, in the dtype in which the daemon computes here."""
    model: Module = load_model(DEFAULT_CHECKPOINT)[0]
    model.set_dtype(demo.layout.logits_dtype)
    return model


@pytest.fixture(scope="module")
def said(prompts: Answers, peer: Module) -> Answers:
    """What mlx-lm says to each prompt, token by token."""
    return {question: _greedy(peer, prompt) for question, prompt in prompts.items()}


@pytest.fixture(params=[*ATTENTION.values()], ids=[*ATTENTION])
def daemon(demo: Served, request: pytest.FixtureRequest) -> OfflineDaemon:
    attention: Attention = request.param()
    return OfflineDaemon(demo, attention, Room(128))


def _greedy(model: Module, prompt: Sequence[int]) -> list[int]:
    cache, said = make_prompt_cache(model), list[int]()
    tokens = list(prompt)
    for _ in range(OUTPUT_TOKENS):
        logits = model(mx.array([tokens]), cache=cache)
        tokens = [int(logits[0, -1].argmax().item())]
        said += tokens
    return said


def _request(question: str, prompt: Sequence[int], n: int = 1) -> Request:
    return Request(question, pack(prompt), OUTPUT_TOKENS, SamplingParams(temperature=0), n=n)


def test_margins_are_wide(prompts: Answers, said: Answers, peer: Module) -> None:
    """Up to the end of the answer; what a model says behind its end means nothing."""
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_CHECKPOINT)
    for question, prompt in prompts.items():
        answer = list(said[question])
        answer = answer[: answer.index(tokenizer.eos_token_id) + 1]
        logits = reference(peer, [*prompt, *answer])[len(prompt) - 1 : -1]
        best = np.sort(logits, axis=1)[:, -2:]
        assert (best[:, 1] - best[:, 0]).min() > MARGIN


def test_one_by_one_and_again(daemon: OfflineDaemon, prompts: Answers, said: Answers) -> None:
    for name in ("cold", "warm"):
        for question, prompt in prompts.items():
            answer = daemon.serve(_request(f"{name} {question}", prompt))
            assert answer[f"{name} {question}", 0] == said[question]


def test_together(daemon: OfflineDaemon, prompts: Answers, said: Answers) -> None:
    answers = daemon.serve(*(_request(name, prompt, n=2) for name, prompt in prompts.items()))
    assert answers == {(name, index): said[name] for name in prompts for index in range(2)}


def test_with_too_few_blocks(demo: Served, prompts: Answers, said: Answers) -> None:
    daemon = OfflineDaemon(demo, Attention(), Room(48))
    answers = daemon.serve(*(_request(name, prompt) for name, prompt in prompts.items()))
    assert daemon.scheduler.metrics.preemptions > 0
    assert answers == {(name, 0): said[name] for name in prompts}

"""What KV formats change of a real model's predictions, and that cached K and V change no more."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.mlx_backend.loading.format_check import check_formats
from engine.values.settings import EngineConfig, KVFormat
from tests.devices import cpu_float32
from tests.golden.real_prompts import Prompt, Writer, lengths
from tests.golden.real_reference import (
    GREEDY_WITH_TWO_BEST,
    RealDaemon,
    Reference,
    Scores,
    little_cache,
    stored_as,
)
from tests.offline import Room, Served, load

pytestmark = [pytest.mark.slow, cpu_float32]

ROOM = Room(160, block_size=32, max_running=16, step_tokens=512)
TEXT_TOKENS = 600
ANSWERED = slice(0, None, 11)
"""Of the hundred prompts: 10, of all kinds."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How a format's predictions may differ from those in full precision: the perplexity of a text
    by that share of it, the likeliest next token after at most that share of all tokens, and the
    KL divergence that the check at load finds, in nats.

    Two tokens whose log-probabilities differ by less than `tie` may be ranked otherwise in a
    forward of another shape, because a number that differs in its last bits may be rounded to the
    next code.
    """

    perplexity: float
    tokens: float
    divergence: float
    tie: float


BOUNDS = {
    KVFormat.F16: Bounds(1e-4, 0.002, 1e-6, 4e-3),
    KVFormat.BF16: Bounds(2e-3, 0.01, 2e-4, 0.02),
    KVFormat.Q8: Bounds(5e-3, 0.02, 1e-3, 0.05),
    KVFormat.K8V4: Bounds(0.05, 0.1, 0.05, 0.2),
}


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Iterator[Reference]:
    with little_cache():
        yield Reference.of(smollm2)


@pytest.fixture(scope="module")
def full(smollm2: Path) -> Served:
    return load(smollm2)


@pytest.fixture(scope="module")
def text(reference: Reference) -> tuple[int, ...]:
    return reference.writer.documentation(TEXT_TOKENS)


@pytest.fixture(scope="module")
def full_scores(full: Served, text: Sequence[int]) -> Scores:
    return RealDaemon(full, ROOM).scores(text)[0]


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> list[Prompt]:
    writer = Writer(reference.tokenizer, lambda prompt: "It is a good question.")
    return writer.hundred()[ANSWERED]


@pytest.fixture(params=BOUNDS)
def kv_format(request: pytest.FixtureRequest) -> KVFormat:
    chosen: KVFormat = request.param
    return chosen


@pytest.fixture
def served(full: Served, kv_format: KVFormat) -> Served:
    return stored_as(full, kv_format)


def test_predictions_hardly_change(
    served: Served, kv_format: KVFormat, text: Sequence[int], full_scores: Scores
) -> None:
    scores, _ = RealDaemon(served, ROOM).scores(text)
    change = scores.perplexity / full_scores.perplexity - 1
    pairs = zip(scores.likeliest, full_scores.likeliest, strict=True)
    differing = sum(ours != theirs for ours, theirs in pairs) / len(scores.likeliest)
    assert abs(change) < BOUNDS[kv_format].perplexity
    assert differing <= BOUNDS[kv_format].tokens


def test_the_check_at_load_serves_the_format(
    served: Served, kv_format: KVFormat, smollm2: Path
) -> None:
    config = EngineConfig(str(smollm2), kv_format=kv_format)
    divergence, _ = check_formats(served.loaded, served.execution, config, lambda line: None)
    assert divergence is not None
    assert 0 < divergence < BOUNDS[kv_format].divergence


def test_answers_are_the_same_cold_and_warm(
    served: Served, kv_format: KVFormat, prompts: Sequence[Prompt]
) -> None:
    """Up to the first token where the two best ones are nearly as likely, and there both answers
    have one of the two.
    """
    daemon = RealDaemon(served, ROOM)
    cold = daemon.answers(prompts, speculate=False, sampling=GREEDY_WITH_TWO_BEST)
    warm = daemon.answers(prompts)
    assert daemon.cached_tokens == lengths(prompts) - len(prompts)
    n_differing = 0
    for prompt in prompts:
        [first], [second] = cold[prompt], warm[prompt]
        parting = first.parting(second)
        if parting is None:
            assert first == second
            continue
        n_differing += 1
        (best, best_logprob), (other, other_logprob) = first.logprobs[parting].top
        assert (first.tokens[parting], second.tokens[parting]) == (best, other)
        assert best_logprob - other_logprob < BOUNDS[kv_format].tie
    assert n_differing < len(prompts) / 2

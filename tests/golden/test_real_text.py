"""A real model says what mlx-lm says, to the letter, however its requests are served."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.devices import cpu_float32
from tests.golden.real_prompts import Prompt, lengths
from tests.golden.real_reference import RealDaemon, Reference, expect_all
from tests.offline import Room, Served, load

pytestmark = cpu_float32

BLOCK_SIZE = 32
ROOM = Room(480, BLOCK_SIZE, max_running=16, step_tokens=512)
PERPLEXITY = 1e-4
LOGPROB = 1e-3


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return Reference.of(smollm2)


@pytest.fixture(scope="module")
def served(smollm2: Path) -> Served:
    return load(smollm2)


@pytest.fixture(scope="module")
def few(reference: Reference) -> list[Prompt]:
    return [replace(prompt, max_tokens=12) for prompt in reference.writer.few()]


def test_a_few_prompts_cold_forked_and_warm(
    served: Served, reference: Reference, few: Sequence[Prompt]
) -> None:
    daemon = RealDaemon(served, ROOM)
    expect_all(reference, daemon.answers(few, n=2, speculate=False))
    assert daemon.accepted_tokens == 0
    expect_all(reference, daemon.answers(few))
    assert daemon.cached_tokens == lengths(few) - len(few)
    assert daemon.accepted_tokens > 0


def test_log_probabilities_of_a_page_of_documentation(served: Served, reference: Reference) -> None:
    page = reference.writer.documentation(300)
    found, _ = RealDaemon(served, ROOM).scores(page)
    expected = reference.scores(page)
    assert found.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB)
    assert abs(found.perplexity - expected.perplexity) < PERPLEXITY

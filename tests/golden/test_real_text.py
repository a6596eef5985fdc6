"""A real model says what mlx-lm says, to the letter, however its requests are served."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engine.core.inbox import Inbox
from engine.values.output import FinishReason
from tests.devices import cpu_float32
from tests.golden.compiling import compile_at_once
from tests.golden.real_prompts import Prompt, lengths
from tests.golden.real_reference import (
    Answer,
    RealDaemon,
    Reference,
    expect_all,
    little_cache,
    perplexity,
)
from tests.golden.test_restarts import disk_cache
from tests.offline import Room, Served, load
from tests.profiles import examples

pytestmark = cpu_float32

BLOCK_SIZE = 32
ROOM = Room(480, BLOCK_SIZE, max_running=16, step_tokens=512)
SMALL_ROOM = replace(ROOM, n_blocks=64, block_size=8)
"""For about four sequences, which take blocks as they grow."""
DISK_BYTES = 1 << 30
PARTS = 5
PERPLEXITY = 1e-4
LOGPROB = 1e-3

DOCUMENTATION_TOKENS, PIECE_TOKENS = examples(2000), 1000
"""20,000 tokens, which take mlx-lm and the engine minutes, are for the nightly profile."""


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Iterator[Reference]:
    with little_cache():
        yield Reference.of(smollm2)


@pytest.fixture(scope="module")
def served(smollm2: Path) -> Served:
    return load(smollm2)


@pytest.fixture(scope="module")
def few(reference: Reference) -> list[Prompt]:
    return [replace(prompt, max_tokens=12) for prompt in reference.writer.few()]


@pytest.fixture(scope="module")
def hundred(reference: Reference) -> list[Prompt]:
    return reference.writer.hundred()


def test_a_few_prompts_cold_forked_and_warm(
    served: Served, reference: Reference, few: Sequence[Prompt]
) -> None:
    daemon = RealDaemon(served, ROOM)
    expect_all(reference, daemon.answers(few, n=2, speculate=False))
    assert daemon.accepted_tokens == 0
    expect_all(reference, daemon.answers(few))
    assert daemon.cached_tokens == lengths(few) - len(few)
    assert daemon.accepted_tokens > 0


def test_another_answer_is_noticed(reference: Reference, few: Sequence[Prompt]) -> None:
    prompt = few[0]
    answer = reference.answer(prompt)
    first, second, *rest = answer.tokens
    wrong = (
        reference.answer_of([first, second + 1, *rest]),
        reference.answer_of([first, second]),
        replace(answer, text=f" {answer.text}"),
        replace(answer, reason=FinishReason.ABORT),
    )
    for other in wrong:
        with pytest.raises(AssertionError):
            reference.expect(prompt, other)


def test_log_probabilities_of_a_page_of_documentation(served: Served, reference: Reference) -> None:
    page = reference.writer.documentation(300)
    found, _ = RealDaemon(served, ROOM).scores(page)
    expected = reference.scores(page)
    assert found.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB)
    assert abs(found.perplexity - expected.perplexity) < PERPLEXITY


@pytest.mark.slow
def test_one_after_another_without_drafts_and_again_with_drafts(
    served: Served, reference: Reference, hundred: Sequence[Prompt]
) -> None:
    daemon, some = RealDaemon(served, ROOM), hundred[::4]
    for prompt in some:
        expect_all(reference, daemon.answers([prompt], speculate=False))
    for prompt in some:
        expect_all(reference, daemon.answers([prompt]))
        assert daemon.cached_tokens == len(prompt.tokens) - 1
        assert daemon.accepted_tokens > 0 or len(reference.answer(prompt).tokens) < 3


@pytest.fixture(scope="module")
def at_once(
    served: Served, hundred: Sequence[Prompt]
) -> tuple[dict[Prompt, list[Answer]], Sequence[int]]:
    """The answers to a hundred prompts at once, cold and after a restart, and how many tokens of
    the prompts were cached each time.
    """
    answers, cached = {prompt: list[Answer]() for prompt in hundred}, list[int]()
    with TemporaryDirectory() as directory:  # pytest would keep the gigabyte
        for _ in range(2):
            inbox = Inbox()
            disk = disk_cache(Path(directory), inbox, DISK_BYTES)
            daemon = RealDaemon(served, ROOM, disk=disk, inbox=inbox)
            for prompt, said in daemon.answers(hundred).items():
                answers[prompt] += said
            cached.append(daemon.cached_tokens)
            daemon.loop.stop()
            daemon.loop.run()
            del daemon
    return answers, cached


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_hundred_at_once_and_again_after_a_restart(
    at_once: tuple[dict[Prompt, list[Answer]], Sequence[int]],
    reference: Reference,
    hundred: Sequence[Prompt],
    part: int,
) -> None:
    """In parts, each within the suite's limit for a test: mlx-lm answers one after another."""
    answers, _ = at_once
    expect_all(reference, {prompt: answers[prompt] for prompt in hundred[part::PARTS]})
    assert all(len(said) == 2 for said in answers.values())


@pytest.mark.slow
def test_a_restart_finds_a_hundred_prompts_on_disk(
    at_once: tuple[dict[Prompt, list[Answer]], Sequence[int]], hundred: Sequence[Prompt]
) -> None:
    answers, cached = at_once
    # Blocks alone are on disk, and of a prompt that memory has nearly all of, not even these.
    in_blocks = sum((len(prompt.tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in hundred)
    assert cached[1] > 0.98 * in_blocks > 1.5 * cached[0]
    reasons = {answer.reason for said in answers.values() for answer in said}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.slow
def test_forked_at_once(served: Served, reference: Reference, hundred: Sequence[Prompt]) -> None:
    daemon = RealDaemon(served, ROOM)
    expect_all(reference, daemon.answers(hundred[1::4], n=2))
    assert daemon.store.counters.fork_copies > 0


@pytest.mark.slow
def test_preempted(served: Served, reference: Reference, hundred: Sequence[Prompt]) -> None:
    daemon = RealDaemon(served, SMALL_ROOM)
    expect_all(reference, daemon.answers(hundred[2::4]))
    assert daemon.scheduler.metrics.preemptions > 0


@pytest.mark.slow
def test_long_answers_drafted_plain_and_compiled(served: Served, reference: Reference) -> None:
    """Of code and text that is repeated, drafts come from the sequence's own text."""
    prompts = reference.writer.long()
    drafted, plain = RealDaemon(served, ROOM), RealDaemon(served, ROOM)
    compiled = RealDaemon(served, ROOM, decode=compile_at_once)
    n_accepted = 0
    for prompt in prompts:
        expect_all(reference, drafted.answers([prompt]))
        n_accepted += drafted.accepted_tokens
    assert n_accepted > 100
    for daemon in (plain, compiled):
        expect_all(reference, daemon.answers(prompts, speculate=False))
        assert daemon.accepted_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, DOCUMENTATION_TOKENS, PIECE_TOKENS))
def test_the_perplexity_of_documentation(served: Served, reference: Reference, start: int) -> None:
    tokens = reference.writer.documentation(DOCUMENTATION_TOKENS)
    piece = tokens[start : start + PIECE_TOKENS]
    ours, answer = RealDaemon(served, ROOM).scores(piece)
    own = reference.scores(piece)
    reference.expect(Prompt(f"documentation from {start}", piece, 1), answer)
    assert ours.logprobs == pytest.approx(own.logprobs, abs=LOGPROB)
    assert abs(perplexity(ours.logprobs) - perplexity(own.logprobs)) < PERPLEXITY

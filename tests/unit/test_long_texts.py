"""Prompts and predictions of any length cost the engine thread little: what depends on their length
is computed once a request, on another thread, and the rest is spread over steps.

The tests count operations. `load_tests.bench.long_texts` measures times.
"""

import tracemalloc
from collections.abc import Sequence

import pytest

import engine.core.sequence
import kvstore.store
from engine.core.drafting import MAX_ATTEMPTS, ROWS_AN_ATTEMPT, DraftPolicy
from engine.core.sequence import ADMISSION_BLOCKS, MAX_BEGUN_BLOCKS
from engine.drafts.sources import Draft
from engine.drafts.suffix_index import SortedText
from engine.remote.calls import CALLS
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from kvstore import invariants
from kvstore.tokens import Tokens, block_digests
from kvstore.types import DEFAULT_NAMESPACE
from tests.unit.engine_harness import VOCAB_SIZE, Harness, prompt

N_TOKENS = 120_000


@pytest.fixture
def sorted_texts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that are sorted."""
    lengths, sort = list[int](), SortedText.__init__

    def init(self: SortedText, tokens: Tokens, skipped: int = 0) -> None:
        sort(self, tokens, skipped)
        if len(tokens):
            lengths.append(len(self))

    monkeypatch.setattr(SortedText, "__init__", init)
    return lengths


def test_texts_are_indexed_once_a_request_and_before_it_is_queued(sorted_texts: list[int]) -> None:
    """Also if the output leaves the prediction, and for the answers of requests that have ended."""
    harness = Harness(max_context_tokens=2000, n_blocks=2000, drafts=DraftPolicy)
    for name in ("first", "second"):
        request = Request(
            name, pack(prompt(1, 800)), 60, SamplingParams(seed=3), n=6, prediction=pack([7] * 500)
        )
        prepared = harness.scheduler.prepare(request)
        assert sorted_texts == [800, 500]
        sorted_texts.clear()
        harness.scheduler.add(prepared)
        harness.finish()
        assert len(harness.output(name, 5)) == 60
        assert not sorted_texts


def test_a_waiting_prompt_takes_eight_bytes_a_token() -> None:
    """As it comes from the server, with its index for drafts and the hashes of its blocks, however
    many outputs are to be made of it.
    """
    ids = [at * 7919 % VOCAB_SIZE for at in range(N_TOKENS)]
    harness = Harness(max_context_tokens=2 * N_TOKENS, n_blocks=N_TOKENS)
    json = CALLS["submit"].json(Request("r", pack(ids), 40, n=60))
    harness.serve(prompt(1, 4))  # what the first request allocates for all
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        (request,) = CALLS["submit"].arguments.validate_json(json)
        prepared = harness.scheduler.prepare(request)
        hashes = block_digests(DEFAULT_NAMESPACE, prepared.tokens.packed(0, N_TOKENS), 32)
        harness.scheduler.add(prepared)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(hashes) == N_TOKENS // 32
    assert after - before <= 8 * N_TOKENS


class Counting:
    """A source of drafts that has none, or one token that is wrong. It counts its attempts."""

    def __init__(self, attempts: list[int], index: int, draft: Draft | None) -> None:
        self._attempts, self._index, self._draft = attempts, index, draft

    def __call__(self, output: Sequence[int], most: int) -> Draft | None:
        self._attempts.append(self._index)
        return self._draft


def test_a_step_makes_a_bounded_number_of_drafts_in_turns() -> None:
    n_sequences = 3 * MAX_ATTEMPTS
    harness = Harness(n_blocks=1000, max_running=n_sequences, step_tokens=4 * n_sequences)
    for i in range(n_sequences):
        harness.add(prompt(i, 3), 40)
    while harness.scheduler.waiting or harness.scheduler.sequences.prefilling:
        harness.step()
    attempts = list[int]()
    for index, sequence in enumerate(harness.scheduler.running):
        Harness.set_drafter(sequence, Counting(attempts, index, None))
    harness.step()
    assert len(attempts) == MAX_ATTEMPTS, "the step before drafted for no row"
    for n_steps in range(1, 5):
        harness.step()
        n_attempts = MAX_ATTEMPTS - n_sequences // ROWS_AN_ATTEMPT
        assert len(attempts) == MAX_ATTEMPTS + n_steps * n_attempts
    assert set(attempts) == set(range(n_sequences))
    harness.finish()


def test_a_step_begins_and_ends_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve outputs of one prompt, which begin and end together, share 21 blocks. They are the
    same as without bounds, and everything is released in the end.
    """
    free = Harness(n_blocks=400, block_size=2, step_tokens=64)
    wanted = free.serve(prompt(1, 41), 6, n=12)
    monkeypatch.setattr(engine.core.sequence, "MAX_BEGUN_BLOCKS", 40)
    monkeypatch.setattr(engine.core.sequence, "ADMISSION_BLOCKS", 0)
    monkeypatch.setattr(kvstore.store, "MAX_RELEASED_BLOCKS", 40)
    bound = Harness(n_blocks=400, block_size=2, step_tokens=64)
    name = bound.add(prompt(1, 41), 6, n=12)
    begun, released, n_references = list[int](), list[int](), 0
    while bound.scheduler.has_work:
        n_running = len(bound.scheduler.running)
        bound.step()
        begun.append(len(bound.scheduler.running) - n_running)
        released.append(n_references - bound.pool.n_references)
        n_references = bound.pool.n_references
    invariants.check_idle(bound.store)
    assert max(begun) == 2
    assert max(released) <= 2 * 40 + 24, "between two steps, and as the next begins"
    for index in range(12):
        assert bound.output(name, index) == free.output(wanted, index)


@pytest.mark.parametrize("n", [1, 30])
def test_a_step_begins_a_bounded_number_of_short_prompts(n: int) -> None:
    """Thirty sequences, of one request or of as many, with blocks and tokens for all at once."""
    harness = Harness(n_blocks=400, max_running=30, step_tokens=2048)
    for i in range(30 // n):
        harness.add(prompt(i, 5), 6, n=n)
    begun = list[int]()
    while len(harness.scheduler.running) < 30:
        n_running = len(harness.scheduler.running)
        harness.step()
        begun.append(len(harness.scheduler.running) - n_running)
    assert max(begun) == MAX_BEGUN_BLOCKS // ADMISSION_BLOCKS
    harness.finish()


def test_blocks_of_ended_sequences_are_there_when_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody is preempted, refused or left without a pinned prefix for references that are still to
    be dropped.
    """
    monkeypatch.setattr(kvstore.store, "MAX_RELEASED_BLOCKS", 1)
    harness = Harness(n_blocks=24, block_size=4)
    for i in range(30):
        request_id = harness.serve(prompt(i, 60), 20)
        assert len(harness.output(request_id)) == 20
        assert not harness.scheduler.metrics.preemptions
    for i in range(4):
        harness.add(prompt(40 + i, 14), 8)
    harness.finish()
    assert not harness.scheduler.metrics.preemptions

"""Logits through the arena equal those through mlx-lm's own caches, however the KV came there."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module

from engine.core.step import Prefill, Prefilled, Score
from engine.mlx_backend.cpu import cascade
from engine.mlx_backend.cpu.cascade import CascadeAttention
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.rows import RowGroup, TokenSpan, work_list
from tests.devices import cpu_attention, tolerance
from tests.golden.driving import (
    BLOCK_SIZE,
    ROOM,
    Driver,
    Logits,
    allowed,
    expect_greedy,
    random_tokens,
    reference,
    rms,
)
from tests.offline import Served

TOLERANCE = tolerance(1e-4)
"""Invariant 25 of docs/internals/invariants.md."""


def expect(found: Logits, model: Module, tokens: Sequence[int]) -> None:
    """`found` are the logits after the last len(found) of the tokens."""
    assert rms(found, reference(model, tokens)[-len(found) :]) < allowed(TOLERANCE, model)


def test_one_row(served: Served, peer: Module, attention: Attention) -> None:
    driver = Driver(served, attention)
    tokens = random_tokens(45, seed=1)
    (found,) = driver.logits([driver.subject(tokens)], lasts=25)
    expect(found, peer, tokens)


def test_ragged_rows_with_shuffled_tables(
    served: Served, peer: Module, attention: Attention
) -> None:
    driver = Driver(served, attention)
    prompt_lengths = [1, 5, BLOCK_SIZE, 40, 77]
    rows = [random_tokens(n + 20, seed=n) for n in prompt_lengths]
    found = driver.logits([driver.subject(tokens) for tokens in rows], lasts=20)
    for logits, tokens in zip(found, rows, strict=True):
        expect(logits, peer, tokens)


@pytest.mark.parametrize("chunk_tokens", [1, 7, BLOCK_SIZE, 3 * BLOCK_SIZE])
def test_prompt_in_chunks(
    served: Served, peer: Module, attention: Attention, chunk_tokens: int
) -> None:
    driver = Driver(served, attention)
    tokens = random_tokens(61, seed=2)
    subject = driver.subject(tokens)
    while subject.remaining_tokens > chunk_tokens:
        driver.prefill(subject, chunk_tokens)
    (found,) = driver.run([(subject, subject.remaining_tokens)])
    expect(found[None], peer, tokens)


def test_chunks_and_decodes_in_one_step(served: Served, peer: Module, attention: Attention) -> None:
    driver = Driver(served, attention)
    old, new = random_tokens(50, seed=3), random_tokens(33, seed=4)
    running, arriving = driver.subject(old), driver.subject(new)
    driver.run([(running, 49)])
    driver.prefill(arriving, 10)
    found = driver.run([(running, 1), (arriving, 23)])
    expect(found[0][None], peer, old)
    expect(found[1][None], peer, new)


def test_warm_prefix(served: Served, peer: Module, attention: Attention) -> None:
    driver = Driver(served, attention)
    first = driver.subject(random_tokens(4 * BLOCK_SIZE, seed=5))
    driver.run([(first, 4 * BLOCK_SIZE)])
    tokens = [*first.tokens, *random_tokens(13, seed=7)]
    second = driver.subject(tokens)
    assert second.lease.cached_tokens == 4 * BLOCK_SIZE
    (found,) = driver.run([(second, 13)])
    expect(found[None], peer, tokens)


def test_fork_then_diverge(served: Served, peer: Module, attention: Attention) -> None:
    driver = Driver(served, attention)
    prompt = random_tokens(2 * BLOCK_SIZE + 3, seed=8)
    parent = driver.subject(prompt)
    driver.run([(parent, len(prompt))])
    child = driver.fork(parent, prompt + random_tokens(5, seed=10), len(prompt))
    assert child.lease.cached_tokens == len(prompt)
    parent.append(random_tokens(5, seed=9))
    steps = [driver.run([(parent, 1), (child, 1)]) for _ in range(5)]
    of_parent, of_child = (np.stack(logits) for logits in zip(*steps, strict=True))
    expect(of_parent, peer, parent.tokens)
    expect(of_child, peer, child.tokens)


def test_prefixes_shared_by_different_rows(
    served: Served, peer: Module, attention: Attention
) -> None:
    """Six rows on one prefix, three of them on a longer one; two rows on another; one alone."""
    driver = Driver(served, attention)
    system, longer = random_tokens(3 * BLOCK_SIZE, seed=11), random_tokens(2 * BLOCK_SIZE, seed=12)
    other = random_tokens(8 * BLOCK_SIZE, seed=13)
    for prefix in (system, system + longer, other):
        first = driver.subject(prefix)
        driver.run([(first, first.remaining_tokens)])
        driver.store.donate(first.lease)
    alone = driver.subject(random_tokens(30, seed=14))
    rows = [
        driver.subject(prefix + random_tokens(15, seed=20 + i))
        for i, prefix in enumerate([system] * 3 + [system + longer] * 3 + [other] * 2)
    ]
    assert [row.remaining_tokens for row in rows] == [15] * 8
    subjects = [*rows, alone]
    found = driver.logits(subjects, lasts=14)
    for logits, subject in zip(found, subjects, strict=True):
        expect(logits, peer, subject.tokens)


def test_cascade_attends_once_to_a_shared_prefix(served_of: Callable[[str], Served]) -> None:
    driver = Driver(served_of("qwen3"), Attention())
    prefix = driver.subject(random_tokens(9 * BLOCK_SIZE, seed=15))
    driver.run([(prefix, 9 * BLOCK_SIZE)])
    rows = [driver.subject([*prefix.tokens, 7 + i]) for i in range(2)]
    tables = [np.array(row.lease.table, dtype=np.uint32) for row in rows]
    spans = [TokenSpan(9 * BLOCK_SIZE, 1, table) for table in tables]
    arena = driver.model.storage.full
    forward = RowGroup(spans, arena)
    work = work_list(
        forward.host_table, forward.starts_host, forward.stops_host, BLOCK_SIZE, min_saved_blocks=9
    )
    n_keys = 9 * BLOCK_SIZE
    assert work.tolist() == [(0, 2, 0, 9, n_keys), (0, 1, 9, 1, 1), (1, 1, 9, 1, 1)]


@cpu_attention
@pytest.mark.parametrize("two_stream_numbers", [1, cascade.TWO_STREAM_NUMBERS])
@pytest.mark.parametrize("pass_blocks", [1, cascade.PASS_BLOCKS])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_q8", "qwen3_k8v4", "gemma3_text_q8"])
def test_blocks_as_long_as_a_daemons_are_read_in_place(
    family: str,
    pass_blocks: int,
    two_stream_numbers: int,
    served_of: Callable[[str], Served],
    peer_of: Callable[[str], Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLX multiplies quantized codes in place in blocks of 32 tokens, not in the shorter ones of
    other tests. Rows of unlike lengths take one pass, or several, each over some of the rows.
    """
    monkeypatch.setattr(cascade, "PASS_BLOCKS", pass_blocks)
    monkeypatch.setattr(cascade, "TWO_STREAM_NUMBERS", two_stream_numbers)
    attention = CascadeAttention(min_saved_blocks=1)
    driver = Driver(served_of(family), attention, room=replace(ROOM, block_size=32))
    prefix = random_tokens(70, seed=21)
    rows = [prefix + random_tokens(n, seed=n) for n in (3, 20, 61)]
    driver.run([(driver.subject(prefix), len(prefix))])
    found = driver.logits([driver.subject(tokens) for tokens in rows], lasts=2)
    for logits, tokens in zip(found, rows, strict=True):
        expect(logits, peer_of(family), tokens)


def test_neighbours_and_other_blocks_are_left_alone(
    served: Served, peer: Module, attention: Attention
) -> None:
    """A sequence goes on as if nothing had happened, and so do two that begin where it was."""
    driver = Driver(served, attention)
    bystander = driver.subject(random_tokens(21, seed=16))
    driver.run([(bystander, 21)])
    rows = [driver.subject(random_tokens(n, seed=n)) for n in (3, 50)]
    driver.run([(row, row.remaining_tokens) for row in rows])
    bystander.append(random_tokens(9, seed=18))
    (found,) = driver.logits([bystander], lasts=8)
    expect(found, peer, bystander.tokens)


def test_prompt_logprobs(served: Served, peer: Module, attention: Attention) -> None:
    driver = Driver(served, attention)
    tokens = random_tokens(150, seed=17)
    subject = driver.subject(tokens)
    row = Prefill(subject.id, 0, tuple(tokens), score=Score(tuple(tokens[1:]), n_top=0))
    [result] = driver.step([row], [(subject, len(tokens))]).rows
    assert isinstance(result, Prefilled)
    scored = result.scores
    logits = mx.array(reference(peer, tokens)[:-1])
    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    expected = logprobs[np.arange(149), tokens[1:]]
    assert [entry.token_id for entry in scored] == tokens[1:]
    differences = np.abs(np.array([entry.logprob for entry in scored]) - expected)
    assert differences.max() < allowed(TOLERANCE, peer)
    assert np.median(differences) < 5 * TOLERANCE  # a number rounded otherwise changes few tokens


def test_greedy_text_equals_mlx_lm(served: Served, peer: Module, attention: Attention) -> None:
    """Each token is the best after those before it, by mlx-lm's logits, or as good as that."""
    driver = Driver(served, attention)
    # Seeds from 0 bring the 4-bit qwen3_next to where two experts are alike to a millionth.
    subjects = [driver.subject(random_tokens(n, seed=100 + n)) for n in (4, 19, 32)]
    prompts = [subject.tokens for subject in subjects]
    for _ in range(30):
        logits = driver.run([(subject, subject.remaining_tokens) for subject in subjects])
        for subject, row in zip(subjects, logits, strict=True):
            subject.append([int(row.argmax())])
    for subject, prompt in zip(subjects, prompts, strict=True):
        expect_greedy(peer, prompt, subject.tokens[len(prompt) :])

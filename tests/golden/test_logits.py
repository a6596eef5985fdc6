"""Logits through the arena equal those through mlx-lm's own caches, however the KV came there."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step

from engine.mlx_backend.attention.cascade import CascadePlan
from engine.mlx_backend.attention.gather import GatherAttention
from engine.mlx_backend.attention.strategy import Attention
from engine.mlx_backend.forward import Forward, Piece
from engine.mlx_backend.loader import LoadedModel
from engine.step import Row, SequenceId, StepPlan
from kvstore.actions import CopyBlock
from tests.golden.driving import (
    BLOCK_SIZE,
    Driver,
    Logits,
    Subject,
    random_tokens,
    reference,
    rms,
)

TOLERANCE = 1e-4
"""Invariant 18 of docs/invariants.md."""


def expect(found: Logits, model: Module, tokens: Sequence[int]) -> None:
    """`found` are the logits after the last len(found) of the tokens."""
    assert rms(found, reference(model, tokens)[-len(found) :]) < TOLERANCE


def test_one_row(loaded: LoadedModel, peer: Module, attention: Attention) -> None:
    driver = Driver(loaded, attention)
    tokens = random_tokens(45, seed=1)
    (found,) = driver.logits([driver.subject(tokens)], [20])
    expect(found, peer, tokens)


def test_ragged_rows_with_shuffled_tables(
    loaded: LoadedModel, peer: Module, attention: Attention
) -> None:
    driver = Driver(loaded, attention)
    prompt_lengths = [1, 5, BLOCK_SIZE, 40, 77]
    rows = [random_tokens(n + 20, seed=n) for n in prompt_lengths]
    found = driver.logits([driver.subject(tokens) for tokens in rows], prompt_lengths)
    for logits, tokens in zip(found, rows, strict=True):
        expect(logits, peer, tokens)


@pytest.mark.parametrize("chunk_tokens", [1, 7, BLOCK_SIZE, 3 * BLOCK_SIZE])
def test_prompt_in_chunks(
    loaded: LoadedModel, peer: Module, attention: Attention, chunk_tokens: int
) -> None:
    driver = Driver(loaded, attention)
    tokens = random_tokens(61, seed=2)
    subject = driver.subject(tokens)
    while len(tokens) - subject.computed_tokens > chunk_tokens:
        driver.prefill(subject, chunk_tokens)
    (found,) = driver.run([(subject, len(tokens) - subject.computed_tokens)])
    expect(found[None], peer, tokens)


def test_chunks_and_decodes_in_one_step(
    loaded: LoadedModel, peer: Module, attention: Attention
) -> None:
    driver = Driver(loaded, attention)
    old, new = random_tokens(50, seed=3), random_tokens(33, seed=4)
    running, arriving = driver.subject(old), driver.subject(new)
    driver.run([(running, 49)])
    driver.prefill(arriving, 10)
    found = driver.run([(running, 1), (arriving, 23)])
    expect(found[0][None], peer, old)
    expect(found[1][None], peer, new)


def test_warm_prefix(loaded: LoadedModel, peer: Module, attention: Attention) -> None:
    driver = Driver(loaded, attention)
    prefix = random_tokens(4 * BLOCK_SIZE, seed=5)
    first = driver.subject(prefix + random_tokens(9, seed=6))
    driver.run([(first, len(first.tokens))])
    tokens = prefix + random_tokens(13, seed=7)
    second = driver.subject(tokens, adopted=first.blocks[:4])
    (found,) = driver.run([(second, 13)])
    expect(found[None], peer, tokens)


def test_fork_then_diverge(loaded: LoadedModel, peer: Module, attention: Attention) -> None:
    driver = Driver(loaded, attention)
    prompt = random_tokens(2 * BLOCK_SIZE + 3, seed=8)
    parent = driver.subject(prompt + random_tokens(5, seed=9))
    driver.run([(parent, len(prompt))])
    copy = CopyBlock(parent.blocks[2], driver.free_block(), 3)
    child_tokens = prompt + random_tokens(5, seed=10)
    child = Subject(SequenceId(99), child_tokens, [*parent.blocks[:2], copy.target], len(prompt))
    steps = [driver.run([(parent, 1), (child, 1)], [copy])]
    steps += [driver.run([(parent, 1), (child, 1)]) for _ in range(4)]
    of_parent, of_child = (np.stack(logits) for logits in zip(*steps, strict=True))
    expect(of_parent, peer, parent.tokens)
    expect(of_child, peer, child_tokens)


def test_prefixes_shared_by_different_rows(
    loaded: LoadedModel, peer: Module, attention: Attention
) -> None:
    """Six rows on one prefix, three of them on a longer one; two rows on another; one alone."""
    driver = Driver(loaded, attention)
    system, longer = random_tokens(3 * BLOCK_SIZE, seed=11), random_tokens(2 * BLOCK_SIZE, seed=12)
    other = random_tokens(8 * BLOCK_SIZE, seed=13)
    a = driver.subject(system + longer)
    b = driver.subject(other)
    alone = driver.subject(random_tokens(30, seed=14))
    driver.run([(a, len(a.tokens)), (b, len(b.tokens)), (alone, 15)])
    plan = (
        [(system, a.blocks[:3])] * 3 + [(system + longer, a.blocks)] * 3 + [(other, b.blocks)] * 2
    )
    rows = [
        driver.subject(prefix + random_tokens(15, seed=20 + i), adopted=adopted)
        for i, (prefix, adopted) in enumerate(plan)
    ]
    subjects = [*rows, alone]
    found = driver.logits(subjects, [1] * len(subjects))
    for logits, subject in zip(found, subjects, strict=True):
        expect(logits, peer, subject.tokens)


def test_cascade_attends_once_to_a_shared_prefix(loaded: LoadedModel) -> None:
    driver = Driver(loaded, GatherAttention())
    prefix = driver.subject(random_tokens(9 * BLOCK_SIZE, seed=15))
    rows = [driver.subject([*prefix.tokens, 7], adopted=prefix.blocks) for _ in range(2)]
    pieces = [Piece(row.computed_tokens, [7], row.blocks) for row in rows]
    plan = CascadePlan(driver.arena, Forward(pieces, driver.arena), min_saved_blocks=9)
    (shared,) = plan.prefixes
    assert (shared.first_row, shared.last_row, shared.n_blocks) == (0, 2, 9)


def test_neighbours_and_other_blocks_are_left_alone(
    loaded: LoadedModel, peer: Module, attention: Attention
) -> None:
    driver = Driver(loaded, attention)
    bystander = driver.subject(random_tokens(21, seed=16))
    driver.run([(bystander, 21)])
    before = [np.array(keys[bystander.blocks]) for keys in driver.arena.arrays()]
    rows = [driver.subject(random_tokens(n, seed=n)) for n in (3, 50)]
    driver.run([(row, len(row.tokens)) for row in rows])
    after = [np.array(keys[bystander.blocks]) for keys in driver.arena.arrays()]
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))


def test_prompt_logprobs(loaded: LoadedModel, peer: Module, attention: Attention) -> None:
    driver = Driver(loaded, attention)
    tokens = random_tokens(150, seed=17)
    subject = driver.subject(tokens)
    row = Row(subject.id, 0, tokens, subject.blocks, None, 0, tokens[1:])
    scored = driver.runner.run(StepPlan((), (row,))).scored[subject.id]
    logits = mx.array(reference(peer, tokens)[:-1])
    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    expected = logprobs[np.arange(149), tokens[1:]]
    assert [entry.token_id for entry in scored] == tokens[1:]
    np.testing.assert_allclose([entry.logprob for entry in scored], expected, atol=TOLERANCE)


def test_greedy_text_equals_mlx_lm(loaded: LoadedModel, peer: Module, attention: Attention) -> None:
    prompts = [random_tokens(n, seed=n) for n in (4, 19, 32)]
    driver = Driver(loaded, attention)
    subjects = [driver.subject([*prompt, *[0] * 30]) for prompt in prompts]
    logits = driver.run([(s, len(p)) for s, p in zip(subjects, prompts, strict=True)])
    for step in range(30):
        for subject, prompt, row in zip(subjects, prompts, logits, strict=True):
            subject.tokens[len(prompt) + step] = int(row.argmax())
        logits = driver.run([(subject, 1) for subject in subjects])
    for subject, prompt in zip(subjects, prompts, strict=True):
        generated = generate_step(mx.array(prompt), peer, max_tokens=30)
        assert subject.tokens[len(prompt) :] == [token for token, _ in generated]

"""The sampler's changes to logits against a reference that goes token by token in float64."""

import math
from collections import Counter

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.mlx_backend.sampling import logits as change
from engine.step import SampleOrder
from engine.types import SamplingParams

VOCAB = 8

token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=12)
logit_values = st.floats(-20, 20, width=32) | st.just(-math.inf)
rows = st.lists(logit_values, min_size=VOCAB, max_size=VOCAB)
# Multiples of 1/4 are exact in float32, and make equal logits frequent.
coarse = st.integers(-12, 12).map(lambda quarters: quarters / 4)
coarse_rows = st.lists(coarse, min_size=VOCAB, max_size=VOCAB)

orders = st.builds(
    SampleOrder,
    params=st.builds(
        SamplingParams,
        repetition_penalty=st.floats(0.25, 4),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        logit_bias=st.dictionaries(st.integers(0, VOCAB + 2), st.floats(-100, 100)),
    ),
    seed=st.just(0),
    output_index=st.just(0),
    prompt_tokens=token_lists,
    output_tokens=token_lists,
    banned_tokens=st.lists(st.integers(0, VOCAB + 2), max_size=3),
)


def edited(row: list[float], order: SampleOrder) -> list[float]:
    params = order.params
    result = [*row]
    occurrences = Counter(order.output_tokens)
    for token in range(VOCAB):
        result[token] += params.logit_bias.get(token, 0.0)
        if token in order.prompt_tokens or token in order.output_tokens:
            positive = result[token] > 0
            penalty = params.repetition_penalty
            result[token] *= 1 / penalty if positive else penalty
        result[token] -= params.presence_penalty * (token in occurrences)
        result[token] -= params.frequency_penalty * occurrences[token]
        if token in order.banned_tokens:
            result[token] = -math.inf
    return result


@given(batch=st.lists(st.tuples(rows, orders), min_size=1, max_size=4))
def test_edits_of_single_tokens(batch: list[tuple[list[float], SampleOrder]]) -> None:
    logits = mx.array([row for row, _ in batch], dtype=mx.float32)
    asked = [order for _, order in batch]
    for edit in (
        change.add_bias,
        change.penalize_repetition,
        change.penalize_presence,
        change.penalize_frequency,
        change.ban,
    ):
        logits = edit(logits, asked)
    expected = np.array([edited(row, order) for row, order in batch])
    np.testing.assert_allclose(np.array(logits), expected, rtol=1e-5, atol=1e-3)


def kept(row: list[float], top_k: int, top_p: float) -> set[int]:
    """Likeliest first, of equals the lowest id, until the mass is reached."""
    ranked = sorted(range(VOCAB), key=lambda token: (-row[token], token))[: top_k or VOCAB]
    mass = [math.exp(row[token]) for token in ranked]
    before = 0.0
    result: set[int] = set()
    for token, weight in zip(ranked, mass, strict=True):
        if result and before >= top_p * sum(mass):
            break
        result.add(token)
        before += weight
    return result


@given(
    row=coarse_rows,
    top_k=st.integers(0, VOCAB + 1),
    # Odd enough that no sum of a few exponentials comes within float32's error of it.
    top_p=st.sampled_from([0.0, 0.1237, 0.3719, 0.61803, 0.8713, 0.9571, 0.99013, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_top_k_and_top_p_keep_the_same_tokens_by_either_way(
    row: list[float], top_k: int, top_p: float, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    order = SampleOrder(params, seed=0, output_index=0)
    logits = change.temper(mx.array([row]), [order])
    expected = kept([value / temperature for value in row], top_k, top_p)
    for keep in (change.keep_short_list, change.keep_head):
        [values] = np.array(keep(logits, [order]))
        assert set(np.flatnonzero(np.isfinite(values)).tolist()) == expected


def test_a_top_p_of_one_keeps_what_float32_cannot_add_up() -> None:
    order = SampleOrder(SamplingParams(top_k=3), seed=0, output_index=0)
    logits = mx.array([[0.0, -20.0, -21.0, -22.0]])
    for keep in (change.keep_short_list, change.keep_head):
        assert mx.isfinite(keep(logits, [order])).tolist() == [[True, True, True, False]]


@given(row=coarse_rows, min_p=st.sampled_from([0.01, 0.11, 0.31, 0.71, 1.0]))
def test_min_p_keeps_what_is_likely_enough(row: list[float], min_p: float) -> None:
    order = SampleOrder(SamplingParams(min_p=min_p), seed=0, output_index=0)
    [values] = np.array(change.keep_likely(change.temper(mx.array([row]), [order]), [order]))
    likely = [math.exp(value - max(row)) >= min_p for value in row]
    assert np.isfinite(values).tolist() == likely

"""DRY takes from tokens what llama.cpp's definition says, however the text came about."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.step import Sampling
from engine.mlx_backend.sampling.dry import DryState
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.values.request import Dry, SamplingParams
from engine.values.tokens import pack

BREAKERS = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=2, unique=True
).map(tuple)
PARAMS = st.builds(
    Dry,
    multiplier=st.sampled_from([0.5, 1.0]),
    base=st.sampled_from([1.0, 1.75]),
    allowed_length=st.integers(0, 4),
    penalty_last_n=st.sampled_from([-1, 0, 1, 5, 9]),
    breakers=BREAKERS,
)
TEXT = st.lists(st.integers(0, 3), max_size=24)


def reference(params: Dry, text: Sequence[int]) -> dict[int, float]:
    """As llama.cpp's `dry` sampler has it, step by step and in no hurry."""
    window = len(text) if params.penalty_last_n < 0 else params.penalty_last_n
    recent = list(text[max(len(text) - window, 0) :])
    limit = _longest_allowed(params, recent)
    if len(recent) <= params.allowed_length or limit < params.allowed_length:
        return {}
    repeated: dict[int, int] = {}
    for place in range(len(recent) - 1):
        length = 0
        while length <= place and recent[place - length] == recent[-1 - length]:
            length += 1
        length = min(length, limit)
        if length >= params.allowed_length:
            token = recent[place + 1]
            repeated[token] = max(repeated.get(token, 0), length)
    return {
        token: params.multiplier * params.base ** (length - params.allowed_length)
        for token, length in repeated.items()
        if (token,) not in params.breakers
    }


def _longest_allowed(params: Dry, recent: list[int]) -> int:
    """No repetition goes past the last breaker: what is after it is the most that counts."""
    for after in range(len(recent)):
        first = len(recent) - 1 - after
        found = [
            len(breaker) - 1
            for breaker in params.breakers
            if tuple(recent[first : first + len(breaker)]) == breaker
        ]
        if found:
            return after - max(found)
    return len(recent)


@given(params=PARAMS, prompt=TEXT, output=TEXT)
def test_penalties_are_those_of_the_definition(
    params: Dry, prompt: list[int], output: list[int]
) -> None:
    state = DryState(params, prompt)
    assert state.penalties() == pytest.approx(reference(params, prompt))
    for n_tokens, token in enumerate(output, 1):
        before = state.penalties()
        followed = state.followed_by(token)
        assert state.penalties() == before, "drafts share the state"
        state = followed
        text = [*prompt, *output[:n_tokens]]
        assert state.penalties() == pytest.approx(reference(params, text))
        assert DryState(params, text).penalties() == pytest.approx(state.penalties())


def test_a_long_repetition_rules_its_token_out() -> None:
    text = [1, 2, 3] * 500
    [(token, penalty)] = DryState(Dry(0.8), text).penalties().items()
    assert token == 1
    assert 1e28 < penalty < math.inf
    assert np.isfinite(np.float32(penalty))


@given(params=PARAMS, prompt=TEXT, output=TEXT.filter(bool))
def test_a_row_loses_them_with_its_other_penalties(
    params: Dry, prompt: list[int], output: list[int]
) -> None:
    """Whether it entered the batch with its output, generated it there or verified it."""
    sampling = SamplingParams(dry=params, presence_penalty=0.25, logit_bias={2: 1.0}, min_tokens=99)
    fields = {"prompt_tokens": pack(prompt), "banned_tokens": (3,)}
    entered = SamplingRow(
        Sampling(sampling, 0, len(output), output_tokens=tuple(output), **fields)  # type: ignore[arg-type]
    )
    generated = SamplingRow(Sampling(sampling, 0, **fields))  # type: ignore[arg-type]
    drafted = generated
    for token in output:
        drafted = drafted.followed_by(token)
    for token in output:
        generated.accept(token)
    expected = reference(params, [*prompt, *output])
    for row in (entered, generated, drafted):
        edits = row.edits_with_mask()
        found = dict(zip(edits.tokens.tolist(), edits.values[2].tolist(), strict=True))
        assert len(found) == len(edits.tokens), "each token once"
        for token in range(4):
            own = 0.25 if token in output else 0.0
            wanted = expected.get(token, 0.0) + own
            assert found.get(token, 0.0) == pytest.approx(wanted, rel=1e-6)
        with_bans = row.edits()
        assert sorted(with_bans.tokens.tolist()) == sorted({*edits.tokens.tolist(), 3})
        assert with_bans.values[2, with_bans.tokens.tolist().index(3)] == math.inf

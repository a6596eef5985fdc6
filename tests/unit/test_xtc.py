"""XTC leaves the tokens that mlx-lm leaves."""

from collections import Counter
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc

from engine.core.step import NO_MASKS, Sampling
from engine.mlx_backend.sampling.edits import SamplingRow, kind_of
from engine.mlx_backend.sampling.sampler import Sampler
from engine.values.request import SamplingParams, Xtc

DRAWS = 512


def drawn(logits: Sequence[float], params: SamplingParams, seed: int = 3) -> Counter[int]:
    """How often each token is drawn in DRAWS steps of one sequence."""
    rows = [SamplingRow(Sampling(params, seed, index)) for index in range(DRAWS)]
    batch = mx.broadcast_to(mx.array([logits]), (DRAWS, len(logits)))
    tokens = Sampler(len(logits)).sample(batch, rows, NO_MASKS, ()).read()
    return Counter(token.token_id for token in tokens if token is not None)


def left_by_mlx_lm(logits: Sequence[float], params: SamplingParams) -> mx.array:
    """The log-probabilities that mlx-lm draws from where XTC is applied, -inf for what it leaves
    out. Its top_k comes before XTC here, as it does in llama.cpp.
    """
    assert params.xtc is not None
    left = mx.array([logits]) - mx.logsumexp(mx.array([logits]))
    if params.top_k:
        left = apply_top_k(left, params.top_k)
    if params.top_p < 1:
        left = apply_top_p(left, params.top_p)
    if params.min_p:
        left = apply_min_p(left, params.min_p)
    xtc = params.xtc
    found: mx.array = apply_xtc(left, 1.0, xtc.threshold, list(xtc.protected))
    return found[0]


LOGITS = st.lists(
    st.integers(-32, 32).map(lambda eighths: eighths / 8), min_size=3, max_size=40, unique=True
)
"""No two are so near that rounding decides."""


@given(
    logits=LOGITS,
    threshold=st.sampled_from([0.0, 0.05, 0.1, 0.3, 0.5]),
    protected=st.sets(st.integers(0, 8), max_size=3),
    cuts=st.sampled_from([{}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 2}]),
)
def test_what_is_left_out_is_what_mlx_lm_leaves_out(
    logits: list[float], threshold: float, protected: set[int], cuts: dict[str, float]
) -> None:
    xtc = Xtc(1.0, threshold, tuple(sorted(protected & set(range(len(logits))))))
    params = SamplingParams(xtc=xtc, **cuts)  # type: ignore[arg-type]
    expected = np.array(mx.softmax(left_by_mlx_lm(logits, params)), dtype=np.float64)
    found = drawn(logits, params)
    assert all(expected[token] > 0 for token in found)
    for token, probability in enumerate(expected):
        if probability > 0.05:
            assert found[token] / DRAWS == pytest.approx(probability, abs=0.11)


def test_it_is_applied_as_often_as_it_says() -> None:
    """The likeliest token is drawn only where nothing is left out."""
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    for probability in (0.25, 0.75):
        found = drawn(logits, SamplingParams(xtc=Xtc(probability, 0.1)))
        assert found[0] / DRAWS == pytest.approx(0.5 * (1 - probability), abs=0.09)
    assert drawn(logits, SamplingParams(xtc=Xtc(0.0, 0.1))) == drawn(logits, SamplingParams())


def test_one_token_above_the_threshold_stays() -> None:
    assert drawn(np.log([0.9, 0.06, 0.04]).tolist(), SamplingParams(xtc=Xtc(1.0, 0.1)))[0] > 400


def test_the_thresholds_probabilities_are_those_before_the_temperature() -> None:
    """So it leaves out the likeliest token where the temperature leaves no other any weight."""
    params = SamplingParams(temperature=0.01, xtc=Xtc(1.0, 0.1))
    assert drawn(np.log([0.6, 0.25, 0.15]).tolist(), params) == {2: DRAWS}


def test_greedy_rows_take_the_likeliest_token() -> None:
    params = SamplingParams(temperature=0, xtc=Xtc(1.0, 0.1))
    assert drawn(np.log([0.6, 0.4]).tolist(), params) == {0: DRAWS}


def test_tokens_that_are_ruled_out_are_never_left() -> None:
    params = SamplingParams(
        xtc=Xtc(1.0, 0.1), allowed_token_ids=frozenset({1, 2}), temperature=0.01
    )
    assert drawn(np.log([0.6, 0.25, 0.15]).tolist(), params) == {2: DRAWS}


def test_rows_with_other_parameters_are_of_one_kind() -> None:
    one, other = (SamplingParams(xtc=Xtc(p, t, (2,))) for p, t in [(0.1, 0.2), (0.9, 0.0)])
    assert kind_of(one) == kind_of(other)

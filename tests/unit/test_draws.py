"""Draws as pure functions of arrays: their distribution, their independence, their cost."""

import math
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from engine.mlx_backend.sampling import draws, xtc
from engine.mlx_backend.sampling.draws import Draw, DrawParams, draw
from engine.mlx_backend.sampling.draws import _digest as digest_of
from engine.mlx_backend.sampling.edits import kind_of
from engine.mlx_backend.sampling.sampler import as_list
from engine.values.request import SamplingParams, Xtc
from tests.devices import DEVICE, is_cpu

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

GREEDY = SamplingParams(temperature=0)
KINDS = {
    "greedy": GREEDY,
    "inverse": SamplingParams(),
    "inverse, min_p": SamplingParams(temperature=0.7, min_p=0.05),
    "top_k": SamplingParams(top_k=20, top_p=0.95),
    "top_k of most tokens": SamplingParams(top_k=250),
    "top_p": SamplingParams(top_p=0.9),
    "top_p of many draws": SamplingParams(top_p=0.5),
    "top_p in rounds": SamplingParams(top_p=0.1, min_p=0.05),
    "xtc": SamplingParams(temperature=0.8, min_p=0.01, xtc=Xtc(0.5, 0.05, (3, 9))),
    "xtc, top_p": SamplingParams(top_p=0.9, xtc=Xtc(0.5, 0.0)),
    "xtc, top_k": SamplingParams(top_k=20, top_p=0.95, xtc=Xtc(0.5, 0.1)),
}
all_kinds = pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
random_kinds = pytest.mark.parametrize(
    "params", [params for params in KINDS.values() if params is not GREEDY]
)


def params_of(params: SamplingParams, seeds: Sequence[int], output_index: int = 0) -> DrawParams:
    return DrawParams.of([params] * len(seeds), seeds, [output_index] * len(seeds))


def draw_rows(
    params: SamplingParams, logits: mx.array, seeds: Sequence[int], output_index: int = 0
) -> Draw:
    return draw(kind_of(params), logits, params_of(params, seeds, output_index))


def tokens_of(
    params: SamplingParams, logits: mx.array, seeds: Sequence[int], output_index: int = 0
) -> list[int]:
    return as_list(draw_rows(params, logits, seeds, output_index).tokens)


def logits_of(rows: int, vocab_size: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab_size)).astype(np.float32)


def quantile(degrees: int) -> float:
    """The 99.99th percentile of chi-square, as Wilson and Hilferty approximate it."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.72 * math.sqrt(spread)) ** 3


def check_chi_square(observed: npt.NDArray[np.int64], expected: Doubles) -> None:
    """That counts fit what is expected of each, at least 5."""
    assert expected.min() >= 5
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < quantile(len(expected) - 1), f"{chi_square=} of {len(expected)}"


# Random numbers


def uniforms_of(seeds: Sequence[int], output_indices: Sequence[int]) -> Floats:
    """The two numbers of which each draw of a kind with one proposal is made: [rows, 2]."""
    params = DrawParams.of([SamplingParams()] * len(seeds), seeds, output_indices)
    return np.array(draws.uniforms(draws.random_bits(params.keys, 1))).reshape(-1, 2)


def test_numbers_are_multiples_of_2_to_the_minus_24_above_zero() -> None:
    extremes = np.array([[0, 255, 256, 2**32 - 1, 2**32 - 256]], dtype=np.uint32)
    found = np.array(draws.uniforms(mx.array(extremes)), dtype=np.float64)[0]
    assert (found * 2**24).tolist() == [1, 1, 2, 2**24, 2**24]
    numbers = uniforms_of(range(1000), [0] * 1000).astype(np.float64)
    assert np.all((numbers > 0) & (numbers <= 1))
    assert np.all(numbers * 2**24 == np.round(numbers * 2**24))


SEEDS, TOKENS = 200, 200


@pytest.fixture(scope="module")
def grid() -> Floats:
    """Numbers of adjacent seeds, and of adjacent tokens of each: [SEEDS, TOKENS, 2]."""
    pairs = [(seed, token) for seed in range(SEEDS) for token in range(TOKENS)]
    seeds, tokens = zip(*pairs, strict=True)
    return uniforms_of(seeds, tokens).reshape(SEEDS, TOKENS, 2)


def test_numbers_are_uniform(grid: Floats) -> None:
    for numbers in np.moveaxis(grid, 2, 0):
        counts = np.histogram(numbers, bins=256, range=(0, 1))[0]
        check_chi_square(counts, np.full(256, SEEDS * TOKENS / 256))


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 100])
@pytest.mark.parametrize("axis", [0, 1], ids=["seeds", "indices"])
def test_numbers_of_adjacent_seeds_and_indices_are_independent(
    grid: Floats, axis: int, lag: int
) -> None:
    for numbers in np.moveaxis(grid, 2, 0):
        one = np.take(numbers, range(SEEDS - lag), axis=axis).ravel()
        other = np.take(numbers, range(lag, SEEDS), axis=axis).ravel()
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / math.sqrt(len(one))
        pairs = np.histogram2d(one, other, bins=16, range=((0, 1), (0, 1)))[0].ravel()
        check_chi_square(pairs.astype(np.int64), np.full(256, len(one) / 256))


def test_the_two_numbers_of_a_draw_are_independent(grid: Floats) -> None:
    one, other = grid[..., 0].ravel(), grid[..., 1].ravel()
    assert abs(np.corrcoef(one, other)[0, 1]) < 4 / math.sqrt(len(one))


def test_seeds_of_32_bits_all_differ_and_others_are_modulo_2_to_the_64() -> None:
    assert [digest_of(seed) for seed in (0, 1, 2**32 - 1)] == [0, 1, 2**32 - 1]
    assert digest_of(-1) == digest_of(2**64 - 1)
    digests = {digest_of(seed) for seed in (-1, 0, 2**32, 2**33, 2**63)}
    assert len(digests) == 5


# The distribution of what is drawn


@pytest.mark.parametrize(
    ("vocab_size", "rows", "temperature"),
    [
        *((100, 2000, temperature) for temperature in (0.5, 1.0, 1.7)),
        (8192, 256, 0.5),
        (151_936, 32, 1.0),
    ],
)
def test_draws_follow_the_softmax(vocab_size: int, rows: int, temperature: float) -> None:
    count = 3200 // rows * rows
    logits = logits_of(1, vocab_size, seed=vocab_size)
    repeated = mx.broadcast_to(mx.array(logits), (rows, vocab_size))
    params = SamplingParams(temperature=temperature)
    found = np.concatenate(
        [tokens_of(params, repeated, range(rows), index) for index in range(count // rows)]
    )
    scores = (logits[0].astype(np.float64) - logits.max()) / temperature
    expected = np.exp(scores) / np.exp(scores).sum() * count
    # Neighbours by id are taken together, until as many draws are expected of them as of a bin.
    n_bins = min(vocab_size, 100)
    bins = np.minimum(np.cumsum(expected) * n_bins // count, n_bins - 1).astype(np.int64)
    of_bins: Doubles = np.bincount(bins, expected, n_bins).astype(np.float64)
    observed = np.bincount(bins[found], minlength=n_bins)
    check_chi_square(observed[of_bins >= 5], of_bins[of_bins >= 5])


def test_equal_logits_are_drawn_equally_often_at_every_place() -> None:
    vocab_size, rows = 1280, 1280
    logits = mx.zeros((rows, vocab_size))
    found = np.concatenate(
        [tokens_of(SamplingParams(), logits, range(rows), index) for index in range(20)]
    )
    check_chi_square(np.bincount(found, minlength=vocab_size), np.full(vocab_size, 20.0))


@pytest.mark.parametrize("part", [2.0**-24, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("vocab_size", [100, 1280, 8192])
@random_kinds
def test_ruled_out_tokens_are_not_drawn_at_the_ends_of_the_random_numbers(
    params: SamplingParams, vocab_size: int, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sums that are rounded meet the wanted part of a sum that is rounded otherwise."""

    def same(keys: mx.array, n: int) -> mx.array:
        return mx.full((len(keys), 1, n, 2), round(part * 2**24) - 1 << 8, dtype=mx.uint32)

    for module in (draws, xtc):
        monkeypatch.setattr(module, "random_bits", same)
    generator = np.random.default_rng(vocab_size)
    logits = generator.normal(0, 2, (64, vocab_size)).astype(np.float32)
    allowed = generator.random(logits.shape) < generator.random((64, 1)) ** 4
    allowed[:, generator.integers(vocab_size)] = True
    masked = mx.array(np.where(allowed, logits, -np.inf))
    tokens = tokens_of(params, masked, range(64))
    assert np.all(allowed[np.arange(64), tokens])


# Logits that are no distribution

VALUES = [math.nan, math.inf, -math.inf]


@all_kinds
@pytest.mark.parametrize("vocab_size", [3, 100, 128, 300, 1280])
def test_peaks_tell_what_is_no_distribution_and_tokens_stay_in_the_vocabulary(
    params: SamplingParams, vocab_size: int
) -> None:
    rows: list[Floats] = []
    for value in VALUES:
        rows += [logits_of(1, vocab_size)[0] for _ in range(2)]
        rows[-2][vocab_size - 1] = value
        rows[-1][:] = value
    found = draw_rows(params, mx.array(np.stack(rows)), range(len(rows)))
    peaks = np.array(found.peaks)[:, 0, 0, 0]
    assert np.isnan(peaks[:2]).all()
    assert np.isposinf(peaks[2:4]).all()
    assert np.isfinite(peaks[4]) == (vocab_size > 1)
    assert np.isneginf(peaks[5])
    assert np.all(np.array(found.tokens) < vocab_size)


@all_kinds
@pytest.mark.parametrize("vocab_size", [3, 100, 300])
def test_tokens_stay_in_the_vocabulary_where_the_sign_of_nan_is_set(
    params: SamplingParams, vocab_size: int
) -> None:
    """As integers, which are sorted, the bits of such a NaN are below those of -inf."""
    found = draw_rows(params, mx.full((2, vocab_size), -math.nan), range(2))
    assert np.isnan(np.array(found.peaks)).all()
    assert np.all(np.array(found.tokens) < vocab_size)


# Nothing but a row's own line decides


@all_kinds
@pytest.mark.parametrize("vocab_size", [100, 1280, 8192])
def test_a_row_draws_the_same_in_every_batch(params: SamplingParams, vocab_size: int) -> None:
    logits = mx.array(logits_of(32, vocab_size))
    together = draw_rows(params, logits, range(32), 5)
    for rows in (1, 2, 8):
        for first in range(0, 32, 8):
            part = slice(first, first + rows)
            some = draw_rows(params, logits[part], range(32)[part], 5)
            assert some.tokens.tolist() == together.tokens[part].tolist()
            assert some.peaks.tolist() == together.peaks[part].tolist()
    broken = np.full((32, vocab_size), np.nan, dtype=np.float32)
    broken[::2] = np.array(logits)[::2]
    others = draw_rows(params, mx.array(broken), range(32), 5)
    assert others.tokens[::2].tolist() == together.tokens[::2].tolist()


@all_kinds
def test_draws_are_the_same_compiled(params: SamplingParams) -> None:
    kind = kind_of(params)

    def function(logits: mx.array, params: DrawParams) -> Draw:
        return draw(kind, logits, params)

    compiled = mx.compile(function)
    logits = mx.array(logits_of(8, 8192))
    arrays = params_of(params, range(8))
    for _ in range(5):
        eager, traced = function(logits, arrays), compiled(logits, arrays)
        assert traced.tokens.tolist() == eager.tokens.tolist()
        assert traced.next_keys.tolist() == eager.next_keys.tolist()
        arrays = arrays._replace(keys=traced.next_keys)


@random_kinds
def test_the_next_keys_are_those_of_the_next_token(params: SamplingParams) -> None:
    found = draw_rows(params, mx.zeros((3, 100)), [1, 2, 3], output_index=7)
    assert found.next_keys.tolist() == params_of(params, [1, 2, 3], 8).keys.tolist()


@all_kinds
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_draws_as_its_values_do(params: SamplingParams, dtype: mx.Dtype) -> None:
    logits = mx.array(logits_of(4, 300)).astype(dtype)
    found = draw_rows(params, logits, range(4))
    assert found.peaks.dtype == mx.float32
    assert found.tokens.dtype == mx.uint32
    assert found.tokens.tolist() == tokens_of(params, logits.astype(mx.float32), range(4))


def test_a_kind_is_a_key() -> None:
    kinds = [kind_of(params) for params in KINDS.values()]
    assert len({*kinds, *map(kind_of, KINDS.values())}) == len(set(kinds)) == len(KINDS) - 1
    assert kind_of(SamplingParams(top_k=17)) == kind_of(SamplingParams(top_k=24, top_p=0.5))


# Primitives


@pytest.mark.skipif(not is_cpu(DEVICE), reason="counted for a CPU")
@pytest.mark.parametrize(
    ("params", "most"),
    [
        (GREEDY, 12),
        (SamplingParams(min_p=0.05), 24),
        (SamplingParams(top_k=20, top_p=0.95, min_p=0.05), 40),
        (SamplingParams(top_p=0.9), 40),
        (SamplingParams(top_p=0.5, min_p=0.05), 58),
    ],
    ids=["greedy", "inverse", "top_k", "top_p", "top_p of many draws"],
)
@pytest.mark.parametrize(("vocab_size", "padding"), [(8192, 0), (8200, 1)])
def test_a_draw_has_few_primitives(
    params: SamplingParams, vocab_size: int, padding: int, most: int, tmp_path: Path
) -> None:
    """On a CPU each costs 2 to 4 us, whatever it computes."""
    kind = kind_of(params)
    logits, arrays = mx.zeros((8, vocab_size)), params_of(params, range(8))
    mx.eval(logits, arrays)

    def function(logits: mx.array, params: DrawParams) -> list[mx.array]:
        found = draw(kind, logits, params)
        return [found.tokens, found.peaks]

    def n_primitives(arrays: list[mx.array]) -> int:
        mx.export_to_dot(str(tmp_path / "graph.dot"), *arrays)
        return (tmp_path / "graph.dot").read_text().count("shape=rectangle")

    assert n_primitives(function(logits, arrays)) <= most + padding
    assert n_primitives(mx.compile(function)(logits, arrays)) <= most + padding

"""What the sampler chooses, and that nothing but a row's own state and logits decides it."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from engine.core.step import NO_MASKS, SampledToken, Sampling
from engine.mlx_backend.sampling import draws
from engine.mlx_backend.sampling.draws import Draw, DrawParams, Kind
from engine.mlx_backend.sampling.edits import SamplingRow, mask_of
from engine.mlx_backend.sampling.sampler import Drawn, Sampler
from engine.values.output import TokenLogprob
from engine.values.request import Dry, SamplingParams, Xtc
from engine.values.tokens import pack
from tests.devices import DEVICE, is_cpu, rounding

VOCAB = 12
GREEDY = SamplingParams(temperature=0)
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.02,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    logit_bias={3: 2.0, 5: -1.5},
    top_logprobs=3,
    xtc=Xtc(0.5, 0.1, (2,)),
    dry=Dry(0.8, allowed_length=1, breakers=((4,), (6, 7))),
)


def new_row(params: SamplingParams, seed: int = 0, output_index: int = 0) -> SamplingRow:
    return SamplingRow(Sampling(params, seed, output_index))


def draw(logits: mx.array, rows: Sequence[SamplingRow]) -> Drawn:
    return Sampler(logits.shape[1]).sample(logits, rows, NO_MASKS, [])


def sample(logits: mx.array, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """What is sampled where no row is unusable."""
    tokens = [token for token in draw(logits, rows).read() if token is not None]
    assert len(tokens) == len(rows)
    return tokens


def choose(logits: list[float], params: SamplingParams, **fields: object) -> int:
    sampling = replace(Sampling(params, seed=0), **fields)  # type: ignore[arg-type]
    return sample(mx.array([logits]), [SamplingRow(sampling)])[0].token_id


def drawn(logits: list[float], params: SamplingParams, draws: int) -> Counter[int]:
    """How often each token comes out of so many draws of one sequence."""
    rows = [new_row(params, seed=7, output_index=index) for index in range(draws)]
    tokens = sample(mx.broadcast_to(mx.array(logits), (draws, len(logits))), rows)
    return Counter(token.token_id for token in tokens)


def report(logits: mx.array, params: SamplingParams) -> TokenLogprob:
    """What is said of the one token that a row of logits [1, vocab] is sampled for."""
    [token] = sample(logits, [new_row(params)])
    assert token.logprob is not None
    assert token.logprob.token_id == token.token_id
    return token.logprob


def log(*probabilities: float) -> list[float]:
    return [math.log(p) if p else -math.inf for p in probabilities]


def test_greedy_takes_the_largest_and_of_equals_the_first() -> None:
    assert choose([0.0, 2.0, 1.0, 2.0], GREEDY) == 1


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_any_float_type_will_do(dtype: mx.Dtype) -> None:
    logits = mx.array([[0.0, 3.0, 1.0]], dtype=dtype)
    token = report(logits, replace(GREEDY, top_logprobs=0))
    assert token.token_id == 1
    assert token.logprob == pytest.approx(3 - math.log(1 + math.e**3 + math.e), abs=1e-6)


def test_the_callers_logits_stay_as_they_are() -> None:
    logits = mx.random.normal((2, VOCAB), key=mx.random.key(0))
    before = logits.tolist()
    params = replace(EVERYTHING, min_tokens=1)
    bans = Sampling(params, seed=0, output_tokens=(1, 2), banned_tokens=(0,))
    sample(logits, [SamplingRow(bans), new_row(GREEDY)])
    assert logits.tolist() == before


# Filters


def survivors(row: list[float], params: SamplingParams) -> set[int]:
    return set(drawn(row, params, draws=400))


def test_top_k_keeps_exactly_k_of_equals_the_first() -> None:
    assert survivors([1.0, 2.0, 1.0, 1.0, 1.0], SamplingParams(top_k=3)) == {0, 1, 2}


def test_a_large_top_k() -> None:
    logits = [1e-6 * (token % 1500) for token in range(3000)]  # nearly flat: all are drawn
    tokens = drawn(logits, SamplingParams(top_k=1100), draws=1000)
    assert 950 <= min(token % 1500 for token in tokens) < 960


def test_top_p_is_the_smallest_set_that_reaches_it() -> None:
    row = log(0.25, 0.5, 0.125, 0.125)
    assert survivors(row, SamplingParams(top_p=0.49)) == {1}
    assert survivors(row, SamplingParams(top_p=0.51)) == {0, 1}
    assert survivors(row, SamplingParams(top_p=0.8)) == {0, 1, 2, 3}  # equals stay together
    assert survivors(row, SamplingParams(top_p=0.8, top_k=4)) == {0, 1, 2, 3}
    assert survivors(row, SamplingParams(top_p=0.9, top_k=3)) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-9, 1e-5, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    row = [80.0, 100.0, -100.0, 99.0]
    assert survivors(row, SamplingParams(temperature=temperature, top_p=0.9)) == {1}


# Edits of single tokens


def test_presence_counts_once_and_frequency_every_time() -> None:
    row, output = [3.0, 2.1], (0, 0, 0)
    assert choose(row, replace(GREEDY, presence_penalty=0.5), output_tokens=output) == 0
    assert choose(row, replace(GREEDY, frequency_penalty=0.5), output_tokens=output) == 1


# Independence of the batch


def numbers(token: SampledToken) -> dict[int, float]:
    """Log-probabilities by token, as far as any are asked for."""
    if token.logprob is None:
        return {}
    return {token.logprob.token_id: token.logprob.logprob, **dict(token.logprob.top)}


def test_a_row_draws_the_same_alone_and_in_a_batch_of_sixteen() -> None:
    vocab_size = 5000
    mixed = [
        SamplingParams(),
        GREEDY,
        SamplingParams(top_p=0.8, top_logprobs=5),
        SamplingParams(top_k=50, top_logprobs=0),
        SamplingParams(min_p=0.1, temperature=1.7),
        SamplingParams(top_k=2000, top_p=0.95),
        replace(EVERYTHING, top_logprobs=20),
        replace(
            GREEDY,
            frequency_penalty=1.0,
            top_logprobs=2,
            allowed_token_ids=frozenset(range(60)),
            bad_words=((1,), (2, 3)),
        ),
    ]
    samplings = [
        Sampling(
            mixed[i % 8],
            seed=i // 2,
            output_index=i,
            prompt_tokens=pack(range(i)),
            output_tokens=(i, i, i),
        )
        for i in range(16)
    ]
    logits = 4 * mx.random.normal((16, vocab_size), key=mx.random.key(3))
    together = sample(logits, [SamplingRow(sampling) for sampling in samplings])
    alone = [
        sample(logits[i : i + 1], [SamplingRow(sampling)])[0]
        for i, sampling in enumerate(samplings)
    ]
    if is_cpu(DEVICE):
        assert list(map(repr, together)) == list(map(repr, alone))  # repr: exact, and NaN is NaN
    assert [token.token_id for token in together] == [token.token_id for token in alone]
    for ours, theirs in zip(together, alone, strict=True):
        assert numbers(ours) == pytest.approx(numbers(theirs), abs=rounding(1e-5), rel=0)


def test_equal_rows_draw_equal_tokens_and_others_do_not() -> None:
    logits = mx.zeros((64, 1000))
    same = sample(logits, [new_row(SamplingParams(), 5, 9)] * 64)
    assert len({token.token_id for token in same}) == 1
    by_index = sample(logits, [new_row(SamplingParams(), 5, i) for i in range(64)])
    by_seed = sample(logits, [new_row(SamplingParams(), i, 9) for i in range(64)])
    assert len({token.token_id for token in by_index}) > 55
    assert len({token.token_id for token in by_seed}) > 55


# Padding, and how draws are made


def test_padding_rows_change_nothing_and_are_not_read() -> None:
    logits = 3 * mx.random.normal((4, 300), key=mx.random.key(1))
    params = [SamplingParams(), SamplingParams(top_p=0.5, top_logprobs=2), EVERYTHING, GREEDY]
    rows = [new_row(one, seed) for seed, one in enumerate(params)]
    masks = np.full((1, 10), -1, dtype=np.int32)
    masks[0, 0] = 0
    padding = mx.full((4, 300), math.nan)
    for n in range(1, 5):
        exact = Sampler(300).sample(logits[:n], rows[:n], masks, [0])
        padded = mx.concatenate([logits[:n], padding[: 6 - n]])
        found = Sampler(300).sample(padded, rows[:n], masks, [0])
        assert found.tokens.shape == (6 if n > 1 else 5,)
        assert np.all(np.array(found.tokens) < 300)
        assert found.tokens[:n].tolist() == exact.tokens.tolist()
        assert found.read() == exact.read()
        assert len(found.read()) == n


class Draws:
    """Draws as the sampler itself does, and counts how often."""

    def __init__(self) -> None:
        self.kinds: list[Kind] = []

    def __call__(self, kind: Kind, logits: mx.array, params: DrawParams) -> Draw:
        self.kinds.append(kind)
        return draws.draw(kind, logits, params)


def test_rows_of_one_kind_are_drawn_by_the_function_that_was_put_in() -> None:
    sampler, function = Sampler(VOCAB), Draws()
    sampler.draw_with = function
    logits = mx.zeros((2, VOCAB), dtype=mx.bfloat16)
    rows = [new_row(SamplingParams(temperature=t), seed) for seed, t in enumerate((0.5, 2.0))]
    sampler.sample(logits, rows, NO_MASKS, [])
    sampler.sample(logits, [new_row(GREEDY)] * 2, NO_MASKS, [])
    assert function.kinds == [row.kind for row in (rows[0], new_row(GREEDY))]


def test_parameters_are_uploaded_once_while_the_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = list[list[int]]()
    of = DrawParams.of

    def count(
        params: Sequence[SamplingParams], seeds: Sequence[int], indices: Sequence[int]
    ) -> DrawParams:
        uploads.append(list(indices))
        return of(params, seeds, indices)

    monkeypatch.setattr(DrawParams, "of", count)
    sampler = Sampler(VOCAB)
    rows = [new_row(params, 1) for params in (GREEDY, SamplingParams(), SamplingParams(top_k=2))]
    for batch in (rows[:1], rows[1:]):  # of one kind and of several
        uploads.clear()
        for _ in range(3):
            sampler.sample(mx.zeros((len(batch), VOCAB)), batch, NO_MASKS, [])
            for row in batch:
                row.accept(0)
        assert len(uploads) == len(batch)


def test_a_row_draws_the_same_whatever_the_sampler_has_drawn_before() -> None:
    """Rows that join, leave, come back, change places, skip a step, or verify drafts."""
    vocab_size = 300
    generator = random.Random(1)
    kinds = [SamplingParams(), SamplingParams(top_k=9), SamplingParams(min_p=0.02), GREEDY]
    logits = 2 * mx.random.normal((12, vocab_size), key=mx.random.key(2))
    sampler = Sampler(vocab_size)
    samplings = [Sampling(kinds[seed // 3], seed) for seed in range(9)]
    rows = [SamplingRow(sampling) for sampling in samplings]
    batch = [0, 1, 2]
    for step in range(120):
        match generator.choice(("stay", "stay", "stay", "join", "leave", "move", "return")):
            case "join" if absent := set(range(9)) - set(batch):
                batch.append(generator.choice(sorted(absent)))
            case "leave" if len(batch) > 1:
                batch.remove(generator.choice(batch))
            case "move":
                generator.shuffle(batch)
            case "return":  # as after a preemption
                one = generator.choice(batch)
                rows[one] = SamplingRow(
                    replace(samplings[one], output_index=rows[one].output_index)
                )
        states = [rows[one] for one in batch]
        if generator.random() < 0.2:
            states.append(states[-1].followed_by(5))
        padding = generator.choice((0, 0, 0, 2))
        given = logits[: len(states) + padding]
        found = sampler.sample(given, states, NO_MASKS, [])
        fresh = Sampler(vocab_size).sample(given, states, NO_MASKS, [])
        alone = [sample(given[i : i + 1], [state])[0] for i, state in enumerate(states)]
        assert found.read() == fresh.read() == alone, f"{step=}"
        skipping = generator.choice(batch) if generator.random() < 0.1 else None
        for one in batch:
            if one != skipping:
                rows[one].accept(5)


def test_a_row_tells_where_it_is_and_whether_it_edits_logits() -> None:
    row = new_row(SamplingParams(), output_index=3)
    row.accept(1)
    assert (row.output_index, row.has_edits) == (4, False)
    assert new_row(SamplingParams(logit_bias={1: 1.0})).has_edits
    penalized = new_row(SamplingParams(presence_penalty=1.0))
    assert not penalized.has_edits
    assert penalized.followed_by(1).has_edits
    banned = SamplingRow(Sampling(SamplingParams(min_tokens=1), seed=0, banned_tokens=(2,)))
    assert banned.has_edits
    assert not banned.followed_by(1).has_edits


# Tokens that may be generated, and words that may not

LIKELIEST_FIRST = [5.0, 4.0, 3.0, 2.0, 1.0]


def test_only_allowed_tokens_are_drawn_and_the_logprob_is_the_models() -> None:
    allowed = frozenset({3, 4, 99})
    counts = drawn(LIKELIEST_FIRST, SamplingParams(allowed_token_ids=allowed), 200)
    assert counts.keys() == {3, 4}
    params = replace(GREEDY, allowed_token_ids=allowed, top_logprobs=1)
    found = report(mx.array([LIKELIEST_FIRST]), params)
    assert found.token_id == 3
    assert found.top[0][0] == 0


def test_a_bias_does_not_bring_back_what_is_ruled_out() -> None:
    bias = {0: 100.0, 2: 50.0}
    params = replace(GREEDY, logit_bias=bias, allowed_token_ids=frozenset({1, 2, 3}))
    assert choose(LIKELIEST_FIRST, params) == 2
    assert choose(LIKELIEST_FIRST, replace(params, bad_words=((2,),))) == 1


def test_where_nothing_is_left_the_row_alone_has_no_token() -> None:
    nothing = new_row(replace(GREEDY, allowed_token_ids=frozenset({1}), bad_words=((1,),)))
    tokens = draw(mx.array([LIKELIEST_FIRST] * 2), [nothing, new_row(GREEDY)]).read()
    assert tokens == [None, SampledToken(0)]


@pytest.mark.parametrize(
    ("grammar", "allowed", "words", "token"),
    [
        ({1, 2, 3}, {2, 3}, ((2,),), 3),
        ({1, 2, 3}, {2, 4}, ((2,),), 2),  # the word is all that both leave: the grammar wins
        ({1, 2, 3}, {0, 4}, ((1,),), 2),
        ({1}, None, ((1,),), 1),
    ],
)
def test_a_grammar_wins_over_what_would_leave_it_nothing(
    grammar: set[int], allowed: set[int] | None, words: tuple[tuple[int, ...], ...], token: int
) -> None:
    params = replace(
        GREEDY,
        allowed_token_ids=None if allowed is None else frozenset(allowed),
        bad_words=words,
    )
    logits = mx.array([LIKELIEST_FIRST] * 3)
    rows = [new_row(GREEDY), new_row(params), new_row(params)]
    masks = mask_of(grammar, 1)[None]
    tokens = Sampler(5).sample(logits, rows, masks, [1]).read()
    assert tokens[0] == SampledToken(0)
    assert tokens[1] == SampledToken(token)
    assert tokens[2] == draw(logits[:1], [new_row(params)]).read()[0]


# Log-probabilities


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    params = SamplingParams(temperature=0.1, top_k=1, logit_bias={2: 50.0}, top_logprobs=2)
    token = report(mx.array([log(0.5, 0.3, 0.2)]), params)
    assert token.token_id == 2
    assert token.logprob == pytest.approx(math.log(0.2))
    assert [token_id for token_id, _ in token.top] == [0, 1]
    assert [math.exp(logprob) for _, logprob in token.top] == pytest.approx([0.5, 0.3])


def test_each_row_gets_as_many_alternatives_as_it_asks_for() -> None:
    asked = [None, 0, 1, 3, 50]
    tokens = sample(mx.zeros((5, 4)), [new_row(SamplingParams(top_logprobs=n)) for n in asked])
    reports = [token.logprob for token in tokens if token.logprob is not None]
    assert [token.logprob is None for token in tokens] == [True, False, False, False, False]
    assert [len(report.top) for report in reports] == [0, 1, 3, 4]
    assert [token_id for token_id, _ in reports[2].top] == [0, 1, 2]  # of equals the first


def test_given_tokens_are_reported_in_place_of_the_likeliest() -> None:
    """Rows of all kinds together: as many tokens as each names, in its order, the same twice."""
    generator = random.Random(3)
    vocab_size = 300
    logits = 3 * mx.random.normal((24, vocab_size), key=mx.random.key(5))
    exact = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    kinds = [GREEDY, SamplingParams(), replace(EVERYTHING, top_logprobs=None)]
    named = [
        tuple(generator.randrange(vocab_size) for _ in range(generator.choice((0, 1, 2, 40))))
        for _ in logits
    ]
    tops = [generator.choice((0, 3, None)) if not ids else 0 for ids in named]
    rows = [
        new_row(replace(generator.choice(kinds), top_logprobs=top, logprob_token_ids=ids), seed)
        for seed, (top, ids) in enumerate(zip(tops, named, strict=True))
    ]
    for row, (token, top, ids) in enumerate(zip(sample(logits, rows), tops, named, strict=True)):
        if top is None:
            assert token.logprob is None
            continue
        assert token.logprob is not None
        found = token.logprob.top
        if ids:
            assert tuple(token_id for token_id, _ in found) == ids
        else:
            assert len(found) == top
        for token_id, logprob in (*found, (token.token_id, token.logprob.logprob)):
            assert logprob == pytest.approx(exact[row, token_id], abs=1e-5)


def test_scoring_given_tokens() -> None:
    logits = mx.array([log(0.5, 0.3, 0.2), log(0.1, 0.1, 0.8)])
    scored = Sampler(3).score(logits, [1, 0], top=1).read()
    assert scored is not None
    first, second = scored
    assert (first.token_id, first.top[0][0]) == (1, 0)
    assert math.exp(first.logprob) == pytest.approx(0.3)
    assert (second.token_id, second.top[0][0]) == (0, 2)
    assert math.exp(second.logprob) == pytest.approx(0.1)
    assert math.exp(second.top[0][1]) == pytest.approx(0.8)


# Failure


BROKEN = ([math.nan, 1.0, 2.0], [-math.inf] * 3, [math.inf, 0.0, 0.0])


@pytest.mark.parametrize("bad", BROKEN)
@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(), SamplingParams(top_p=0.9, top_logprobs=1), SamplingParams(top_k=2)],
)
def test_a_row_without_a_distribution_has_no_token_and_the_others_have_theirs(
    bad: list[float], params: SamplingParams
) -> None:
    sound = [0.0, 1.0, 2.0]
    drawn = draw(mx.array([sound, bad, sound]), [new_row(params) for _ in range(3)])
    first, unusable, third = drawn.read()
    assert unusable is None
    assert first == third == sample(mx.array([sound]), [new_row(params)])[0]
    assert np.all(np.array(drawn.tokens) < 3)  # the next forward reads one for every row


@pytest.mark.parametrize("bad", BROKEN)
def test_logits_that_are_no_distribution_give_no_scores(bad: list[float]) -> None:
    logits = mx.array([[0.0, 1.0, 2.0], bad])
    assert Sampler(3).score(logits, [0, 0], top=0).read() is None


def test_banning_every_token_that_is_left_leaves_none_to_that_row() -> None:
    params = replace(GREEDY, min_tokens=1)
    nothing = SamplingRow(Sampling(params, seed=0, banned_tokens=(0, 1)))
    assert draw(mx.array([[1.0, 2.0, -math.inf]]), [nothing]).read() == [None]


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="logits"):
        Sampler(4).sample(mx.zeros((1, 3)), [new_row(GREEDY)], NO_MASKS, [])
    with pytest.raises(ValueError, match="logits"):
        Sampler(3).sample(mx.zeros((1, 3)), [new_row(GREEDY)] * 2, NO_MASKS, [])
    with pytest.raises(ValueError, match="logits"):
        Sampler(3).score(mx.zeros((2, 3)), [1], top=0)


# Laziness


def test_sampling_evaluates_nothing() -> None:
    """MLX refuses to evaluate while it traces, so what can be traced waits for nothing."""
    params = [
        GREEDY,
        SamplingParams(),
        SamplingParams(top_p=0.8, min_p=0.1, top_logprobs=5),
        SamplingParams(top_k=50, top_p=0.3),
        replace(EVERYTHING, min_tokens=1),
    ]
    samplings = [Sampling(p, 3, 0, pack((1, 2)), (3,), banned_tokens=(4,)) for p in params]
    rows = [SamplingRow(sampling) for sampling in samplings]
    masks = np.array([[0b1010]], dtype=np.int32)
    sampler = Sampler(VOCAB)

    def tokens(logits: mx.array) -> mx.array:
        return sampler.sample(logits, rows, masks, [1]).tokens

    def scores(logits: mx.array) -> list[mx.array]:
        return sampler.score(logits, range(len(rows)), 2).arrays()

    logits = mx.random.normal((len(rows), VOCAB), key=mx.random.key(0))
    assert mx.compile(tokens)(logits).shape == (len(rows),)
    assert len(mx.compile(scores)(logits)) == 5
    with pytest.raises(ValueError, match="eval"):
        mx.compile(lambda logits: mx.array(tokens(logits).tolist()))(logits)


def test_what_has_been_sampled_does_not_follow_the_row() -> None:
    """The next token may be accepted before anybody has computed the array."""
    params = replace(GREEDY, presence_penalty=2.0)
    row = SamplingRow(Sampling(params, seed=0, output_tokens=(1,)))
    first = draw(mx.array([[1.0, 2.0, 0.5]]), [row])
    row.accept(0)
    second = draw(mx.array([[1.0, 2.0, 0.5]]), [row])
    assert first.tokens.tolist() == [0]
    assert second.tokens.tolist() == [2]


def test_tokens_are_what_a_forward_reads() -> None:
    mixed = [new_row(params) for params in (GREEDY, SamplingParams(), SamplingParams(top_k=2))]
    for rows in (mixed, mixed[:1], mixed[1:2], mixed[2:]):
        tokens = draw(mx.zeros((len(rows), VOCAB)), rows).tokens
        assert (tokens.dtype, tokens.shape) == (mx.uint32, (len(rows),))


# Masks


def test_a_mask_holds_for_its_row_and_decides_over_its_bans() -> None:
    params = replace(GREEDY, min_tokens=1)
    rows = [SamplingRow(Sampling(params, seed=0, banned_tokens=(2,))) for _ in range(3)]
    masks = np.array([[0b0110], [0b0001]], dtype=np.int32)
    logits = mx.array([[0.0, 1.0, 2.0]] * 3)
    tokens = Sampler(3).sample(logits, rows, masks, [2, 0]).read()
    assert [token and token.token_id for token in tokens] == [0, 1, 2]

"""Costs and budgets on simulated machines: each test is seeded and knows no clock."""

import math
import statistics

import pytest

from engine.core.budget import StepBudget, StepCosts, StepShape
from tests.unit.simulated_machine import (
    CPU,
    GPU,
    MANY_HEADS,
    SATURATING_GPU,
    SLOW_CPU,
    TILED_CPU,
    Machine,
    Profile,
    Step,
    limited,
    long_prompt,
    root_mean_square,
    seconds_of,
    slow_down,
    worst_step,
)

LIMIT_SECONDS = 0.25
DECODES = StepShape(decode_rows=4, decode_keys=2000)
PROFILES = pytest.mark.parametrize("profile", [CPU, GPU, SLOW_CPU], ids=["cpu", "gpu", "slow cpu"])
TRACED = ("cpu", "tiled cpu", "many heads", "saturating gpu")
LONG_PROMPTS = [
    (CPU, 18.4, 6),
    (TILED_CPU, 16.7, 8),
    (MANY_HEADS, 168.0, 7),
    (SATURATING_GPU, 1.4, 64),
]
SLOW_DOWNS = [(CPU, 111.3), (TILED_CPU, 80.9), (MANY_HEADS, 769.4), (SATURATING_GPU, 4.9)]
"""Seconds that the prompts of a trace took with a Kalman filter with covariances (mean of five
seeds), and how short half of a long prompt's later chunks may be."""
SEEDS = pytest.mark.parametrize("seed", range(5))


@SEEDS
@pytest.mark.parametrize("profile", [CPU, GPU], ids=["cpu", "gpu"])
def test_predictions_come_near_the_truth(profile: Profile, seed: int) -> None:
    machine = Machine(profile, LIMIT_SECONDS, seed=seed)
    machine.decode(50)
    machine.prompt(3000)
    assert machine.error(StepShape(4, 2000, chunks=((1936, 128),))) < 0.15
    assert machine.error(DECODES) < 0.3


@SEEDS
def test_with_decodes_steps_stay_below_the_limit(seed: int) -> None:
    machine = Machine(CPU, LIMIT_SECONDS, seed=seed)
    machine.decode(20)
    first, later = _seconds(machine.prompt(5000)), _seconds(machine.prompt(5000))
    assert max(first) < 1.2 * LIMIT_SECONDS
    assert max(later) < 1.1 * LIMIT_SECONDS
    assert statistics.median(later) > 0.8 * LIMIT_SECONDS  # and they use it


@SEEDS
def test_a_fast_machine_computes_whole_steps(seed: int) -> None:
    machine = Machine(GPU, LIMIT_SECONDS, seed=seed)
    machine.decode(20)
    machine.prompt(2000)
    assert len(machine.prompt(508 * 4)) == 4


@PROFILES
def test_the_first_chunk_ever_is_moderate(profile: Profile) -> None:
    assert 100 <= _with_decodes(StepCosts()).chunk_tokens(0, 512) <= 300
    machine = Machine(profile, LIMIT_SECONDS)
    machine.decode(1)  # tells the size of all costs
    assert machine.prompt(1000)[0].seconds < 2 * LIMIT_SECONDS


@SEEDS
@pytest.mark.parametrize("speed", [1 / 3, 3.0])
def test_a_change_of_speed_is_learned_within_some_tens_of_steps(speed: float, seed: int) -> None:
    machine = Machine(CPU, LIMIT_SECONDS, seed=seed, step_tokens=2048)
    machine.decode(50)
    machine.prompt(2000)
    machine.speed = speed
    machine.decode(40)
    assert machine.error(DECODES) < 0.2
    machine.prompt(4000)
    steady = _seconds(machine.prompt(4000)[:-1])
    assert max(steady) < 1.3 * LIMIT_SECONDS
    assert statistics.median(steady) > 0.7 * LIMIT_SECONDS


@SEEDS
@pytest.mark.parametrize("pause_seconds", [1.0, 30.0])
def test_a_pause_is_soon_forgotten(pause_seconds: float, seed: int) -> None:
    machine = Machine(CPU, LIMIT_SECONDS, seed=seed)
    machine.decode(50)
    machine.prompt(5000)
    machine.decode(1, pause_seconds)
    assert machine.error(DECODES) < 0.6
    machine.decode(20)
    assert machine.error(DECODES) < 0.2


def test_a_first_step_that_compiles_is_unlearned() -> None:
    machine = Machine(CPU, LIMIT_SECONDS)
    machine.decode(1, pause_seconds=5.0)
    machine.decode(40)
    assert machine.error(DECODES) < 0.2


def test_scored_tokens_take_their_share_of_a_step() -> None:
    """After some steps in which scoring a token takes four times what computing it does."""
    budget = _with_decodes(StepCosts())
    assert budget.chunk_tokens(0, 512, scored=1.0) < budget.chunk_tokens(0, 512)
    costs, score_seconds = StepCosts(), 4 * CPU.token
    for _ in range(3):
        costs.observe(DECODES, CPU.seconds(DECODES))
    for step in range(60):
        n_scored = (step % 2) * 64
        shape = DECODES._replace(chunks=((0, 64),), scored_tokens=n_scored)
        costs.observe(shape, CPU.seconds(shape) + score_seconds * n_scored)
    seconds = costs.prompt_seconds(0, 64, 64) - costs.prompt_seconds(0, 64)
    assert abs(seconds / (64 * score_seconds) - 1) < 0.2
    learned = StepBudget(costs, 6.0)
    learned.add_decodes(*DECODES[:2])
    plain, scored = learned.chunk_tokens(0, 512), learned.chunk_tokens(0, 512, scored=1.0)
    assert scored < 0.4 * plain
    learned.add_chunk(0, scored, scored)
    assert learned.chunk_tokens(0, 512) < plain


EXTRAS = [DECODES._replace(listed_rows=4), DECODES._replace(pooled_chunks=4)]


@pytest.mark.parametrize("extra", EXTRAS, ids=["listed rows", "pooled chunks"])
def test_log_probabilities_and_pooling_take_their_share_of_a_step(extra: StepShape) -> None:
    """After some steps in which each of them takes as long as 20 tokens of a prompt."""
    costs, extra_seconds = StepCosts(), 20 * CPU.token
    plain, more = (shape._replace(chunks=((0, 8),) * 4) for shape in (DECODES, extra))
    for _ in range(3):
        costs.observe(DECODES, CPU.seconds(DECODES))
    for _ in range(50):
        costs.observe(plain, CPU.seconds(plain))
        costs.observe(more, CPU.seconds(more) + 4 * extra_seconds)
    seconds = costs.predict(more) - costs.predict(plain)
    assert abs(seconds / (4 * extra_seconds) - 1) < 0.2


def test_a_step_whose_decodes_list_log_probabilities_has_the_time_for_it() -> None:
    """The limit is a multiple of the decodes' own time, with all that they compute."""
    costs = StepCosts()
    plain, listed = StepBudget(costs, 4.0), StepBudget(costs, 4.0)
    plain.add_decodes(4, 2000)
    listed.add_decodes(4, 2000, 4)
    assert listed.decode_seconds > plain.decode_seconds
    assert listed.left_seconds > plain.left_seconds


@pytest.mark.parametrize("profile", [CPU, SLOW_CPU], ids=["cpu", "slow cpu"])
def test_decodes_alone_do_not_change_what_a_prompt_costs(profile: Profile) -> None:
    """While streams read ever more keys, nothing tells what a prompt costs."""
    ratios = []
    for seed in range(4):
        machine = Machine(profile, LIMIT_SECONDS, seed=seed)
        machine.decode(50)
        machine.prompt(5000)
        before = machine.learned.prompt_seconds(0, 200)
        machine.contexts = [100] * 4
        machine.decode(20_000)
        machine.contexts = [100] * 4
        machine.decode(50)
        ratios.append(machine.learned.prompt_seconds(0, 200) / before)
    assert 1 / 1.75 < min(ratios) <= max(ratios) < 1.75
    assert 1 / 1.4 < statistics.geometric_mean(ratios) < 1.4


def test_alone_a_prompt_goes_at_full_speed() -> None:
    machine = Machine(SLOW_CPU, LIMIT_SECONDS, contexts=[])
    assert len(machine.prompt(2048)) == 4
    budget = StepBudget(machine.learned, LIMIT_SECONDS)
    budget.add_chunk(0, 400)
    assert budget.chunk_tokens(0, 112) == 112  # another prompt beside it


@pytest.mark.parametrize("planned", [0, 100, 200])
def test_alone_a_scored_prompt_takes_no_longer_a_step_than_another(planned: int) -> None:
    """Who comes next waits for the step. Scoring a token takes longer than computing it here."""
    costs = StepCosts()

    def step() -> StepBudget:
        budget = StepBudget(costs, stretch=4.0, step_tokens=512)
        if planned:
            budget.add_chunk(0, planned, planned)
        return budget

    for start in (0, 3000):
        longest = 2 * costs.begin_seconds(start) + costs.prompt_seconds(start, 512)
        budget = step()
        n_tokens = budget.chunk_tokens(start, 512 - planned, scored=1.0)
        if planned < 200:
            assert 50 < n_tokens < 400
        if n_tokens:
            budget.add_chunk(start, n_tokens, n_tokens)
            assert costs.predict(budget.shape) <= longest
        assert step().chunk_tokens(start, 512 - planned) == 512 - planned
    assert planned == 200 or step().chunk_tokens(0, 16, scored=1.0) == 16


def test_without_a_limit_the_step_is_never_too_long() -> None:
    assert _with_decodes(StepCosts(), math.inf).chunk_tokens(10_000, 4096) == 4096


def test_a_prompt_goes_on_where_decodes_leave_no_time() -> None:
    machine = Machine(CPU, LIMIT_SECONDS, contexts=[200] * 400, step_tokens=912)
    machine.decode(50)
    seconds = _seconds(machine.prompt(2000))
    decodes_seconds = machine.seconds(StepShape(400, 200 * 400))
    assert decodes_seconds > LIMIT_SECONDS
    assert len(seconds) < 150
    assert statistics.median(seconds) < 1.6 * (decodes_seconds + CPU.forward)


def test_a_second_chunk_joins_where_it_is_worth_its_forward() -> None:
    machine = Machine(CPU, LIMIT_SECONDS)
    machine.decode(50)
    machine.prompt(5000)
    budget = _with_decodes(machine.learned)
    budget.add_chunk(0, 100)
    assert 50 < budget.chunk_tokens(0, 512) < 250
    assert budget.chunk_tokens(0, 10) == 10
    budget.add_chunk(0, 300)
    assert budget.chunk_tokens(0, 512) == 0


def test_chunks_that_are_cut_short_have_few_lengths() -> None:
    """Of buffers of a new size each time, MLX finds none again."""
    limits = (n / 1000 for n in range(60, 1000))
    lengths = {_with_decodes(StepCosts(), limit).chunk_tokens(1000, 5000) for limit in limits}
    assert min(lengths) < 16
    assert max(lengths) > 256
    assert len([length for length in lengths if 64 <= length < 128]) <= 8
    assert len([length for length in lengths if 128 <= length < 256]) <= 8
    limit = next(
        n for n in range(1, 100) if _with_decodes(StepCosts(), n).chunk_tokens(0, 301) == 301
    )
    assert limit < 10, "what fits whole is not cut"


def test_bytes_are_moved_with_decodes_as_long_as_the_limit_leaves() -> None:
    machine = Machine(CPU, LIMIT_SECONDS)
    machine.decode(50)
    budget = _with_decodes(machine.learned)
    decodes_seconds = machine.learned.predict(budget.shape)
    assert budget.transfer_seconds == pytest.approx(decodes_seconds / 2)
    budget.add_transfer(decodes_seconds / 3)
    assert budget.transfer_seconds == pytest.approx(decodes_seconds / 6)
    budget.add_transfer(decodes_seconds)
    assert budget.transfer_seconds == 0
    tight = _with_decodes(machine.learned, decodes_seconds)
    assert tight.transfer_seconds == 0


def test_without_decodes_bytes_may_take_any_time() -> None:
    budget = StepBudget(StepCosts(), LIMIT_SECONDS)
    budget.add_chunk(0, 100)
    assert budget.transfer_seconds == math.inf


def test_a_prompt_does_not_spend_its_time_on_gathering_what_lies_before_it() -> None:
    """Each chunk gathers it again, so a chunk's tokens may take as long as that does."""
    costs = StepCosts()
    profile = Profile(12e-3, 1.3e-3, 3e-6, 3e-3, 0.5e-6, 60e-6)
    truth = Machine(profile, math.inf, noise=0.0, learned=costs)
    truth.decode(50)
    n_steps, start = 0, 6000
    while start < 6032:
        budget = StepBudget(costs, stretch=4.0)
        budget.add_decodes(4, 404)
        start += (allowed := budget.chunk_tokens(start, 6032 - start))
        budget.add_chunk(start - allowed, allowed)
        costs.observe(budget.shape, truth.seconds(budget.shape))
        n_steps += 1
    assert n_steps <= 3


def test_where_bytes_are_moved_less_of_a_prompt_joins() -> None:
    machine = Machine(CPU, LIMIT_SECONDS)
    machine.decode(50)
    machine.prompt(5000)
    alone, shared = _with_decodes(machine.learned), _with_decodes(machine.learned)
    shared.add_transfer(0.1)
    assert 0 < shared.chunk_tokens(0, 512) < alone.chunk_tokens(0, 512)


def _with_decodes(costs: StepCosts, limit_seconds: float = LIMIT_SECONDS) -> StepBudget:
    return limited(costs, limit_seconds, [100] * 4)


def _seconds(steps: list[Step]) -> list[float]:
    return [step.seconds for step in steps]


def test_a_slow_model_does_what_a_fast_one_does_in_slow_motion() -> None:
    def chunks(factor: float) -> list[int]:
        costs = StepCosts()
        truth = Machine(CPU.scaled(factor), math.inf, noise=0.0, learned=costs)
        truth.decode(50)
        lengths, start = [], 0
        while start < 2000:
            budget = StepBudget(costs, stretch=4.0)
            budget.add_decodes(4, 404)
            lengths.append(budget.chunk_tokens(start, 512))
            budget.add_chunk(start, lengths[-1])
            start += lengths[-1]
            costs.observe(budget.shape, truth.seconds(budget.shape))
        return lengths

    assert chunks(20.0) == chunks(1.0) == chunks(2000.0)


def test_where_many_wait_for_few_they_wait_for_longer() -> None:
    costs = StepCosts()

    def allowed(batch_rows: int) -> int:
        budget = StepBudget(costs, stretch=4.0, batch_rows=batch_rows)
        budget.add_decodes(1, 101)
        return budget.chunk_tokens(0, 512)

    assert allowed(8) > allowed(1)
    assert allowed(0) == allowed(1)


@pytest.mark.parametrize(("profile", "filter_seconds", "n_tokens"), LONG_PROMPTS, ids=TRACED)
def test_a_long_prompt_next_to_streams_keeps_its_pace(
    profile: Profile, filter_seconds: float, n_tokens: int
) -> None:
    """A prompt of 3,611 tokens next to four streams."""
    traces = [long_prompt(profile, seed) for seed in range(5)]
    assert max(map(worst_step, traces)) < 1.3
    assert statistics.fmean(map(seconds_of, traces)) < 1.1 * filter_seconds
    assert max(map(root_mean_square, traces)) < 0.4
    for steps in traces:
        later = [step.n_tokens for step in steps[len(steps) // 2 :]]
        assert statistics.median(later) >= n_tokens, "chunks do not collapse"


@pytest.mark.parametrize(("profile", "filter_seconds"), SLOW_DOWNS, ids=TRACED)
def test_after_a_slow_down_steps_are_right_within_some_tens(
    profile: Profile, filter_seconds: float
) -> None:
    """A machine that slows down, and then two long prompts."""
    traces = [slow_down(profile, seed) for seed in range(5)]
    for decodes, first, later in traces:
        errors = [abs(step.predicted_seconds / step.true_seconds - 1) for step in decodes[30:]]
        assert statistics.median(errors) < 0.2
        assert max(worst_step(first), worst_step(later)) < 1.3
    seconds = [seconds_of(first) + seconds_of(later) for _, first, later in traces]
    assert statistics.fmean(seconds) < 1.1 * filter_seconds

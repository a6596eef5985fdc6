"""Costs and budgets on simulated machines: each test is seeded and knows no clock."""

import math
import statistics

import pytest

from engine.core.budget import StepBudget, StepCosts
from engine.core.step import StepWork
from tests.unit.simulated_machine import CPU, GPU, SLOW_CPU, Machine, beside

LIMIT_SECONDS = 0.25
DECODES = StepWork(forwards=1, decode_rows=4, decode_keys=2000)
PROFILES = pytest.mark.parametrize("profile", [CPU, GPU, SLOW_CPU], ids=["cpu", "gpu", "slow cpu"])
SEEDS = pytest.mark.parametrize("seed", range(5))


@SEEDS
@pytest.mark.parametrize("profile", [CPU, GPU], ids=["cpu", "gpu"])
def test_predictions_come_near_the_truth(profile: tuple[float, ...], seed: int) -> None:
    machine = Machine(profile, LIMIT_SECONDS, seed=seed)
    machine.decode(50)
    machine.prompt(3000)
    assert machine.error(StepWork(2, 4, 2000, 128, 128 * 2000)) < 0.15
    assert machine.error(DECODES) < 0.3


@SEEDS
def test_beside_decodes_steps_stay_below_the_limit(seed: int) -> None:
    machine = Machine(CPU, LIMIT_SECONDS, seed=seed)
    machine.decode(20)
    first, later = machine.prompt(5000), machine.prompt(5000)
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
def test_the_first_chunk_ever_is_moderate(profile: tuple[float, ...]) -> None:
    assert 100 <= _beside_decodes(StepCosts()).allow(0, 512) <= 300
    machine = Machine(profile, LIMIT_SECONDS)
    machine.decode(1)  # tells the size of all costs
    assert machine.prompt(1000)[0] < 2 * LIMIT_SECONDS


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
    steady = machine.prompt(4000)[:-1]
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


def test_decodes_alone_do_not_change_what_a_prompt_costs() -> None:
    machine = Machine(CPU, LIMIT_SECONDS)
    machine.decode(50)
    machine.prompt(5000)
    budget = _beside_decodes(machine.learned)
    before = budget.allow(0, 512)
    machine.contexts = [100] * 4
    machine.decode(20_000)
    machine.contexts = [100] * 4
    machine.decode(50)
    assert _beside_decodes(machine.learned).allow(0, 512) == pytest.approx(before, rel=0.15)


def test_alone_a_prompt_goes_at_full_speed() -> None:
    machine = Machine(SLOW_CPU, LIMIT_SECONDS, contexts=[])
    assert len(machine.prompt(2048)) == 4
    budget = StepBudget(machine.learned, LIMIT_SECONDS)
    budget.chunk(0, 400)
    assert budget.allow(0, 112) == 112  # another prompt beside it


def test_without_a_limit_the_step_is_never_too_long() -> None:
    assert _beside_decodes(StepCosts(), math.inf).allow(10_000, 4096) == 4096


def test_a_prompt_goes_on_where_decodes_leave_no_time() -> None:
    machine = Machine(CPU, LIMIT_SECONDS, contexts=[200] * 400, step_tokens=912)
    machine.decode(50)
    seconds = machine.prompt(2000)
    decodes_seconds = machine.seconds(StepWork(1, 400, 200 * 400))
    assert decodes_seconds > LIMIT_SECONDS
    assert len(seconds) < 150
    assert statistics.median(seconds) < 1.6 * (decodes_seconds + machine.seconds(StepWork(1)))


def test_a_second_chunk_joins_where_it_is_worth_its_forward() -> None:
    machine = Machine(CPU, LIMIT_SECONDS)
    machine.decode(50)
    machine.prompt(5000)
    budget = _beside_decodes(machine.learned)
    budget.chunk(0, 100)
    assert 50 < budget.allow(0, 512) < 250
    assert budget.allow(0, 10) == 10
    budget.chunk(0, 300)
    assert budget.allow(0, 512) == 0


def test_chunks_that_are_cut_short_have_few_lengths() -> None:
    """Of buffers of a new size each time, MLX finds none again."""
    limits = (n / 1000 for n in range(60, 1000))
    lengths = {_beside_decodes(StepCosts(), limit).allow(1000, 5000) for limit in limits}
    assert min(lengths) < 16
    assert max(lengths) > 256
    assert len([length for length in lengths if 64 <= length < 128]) <= 8
    assert len([length for length in lengths if 128 <= length < 256]) <= 8
    limit = next(n for n in range(1, 100) if _beside_decodes(StepCosts(), n).allow(0, 301) == 301)
    assert limit < 10, "what fits whole is not cut"


def test_bytes_are_moved_beside_decodes_as_long_as_the_limit_leaves() -> None:
    machine = Machine(CPU, LIMIT_SECONDS)
    machine.decode(50)
    budget = _beside_decodes(machine.learned)
    decodes_seconds = machine.learned.seconds(budget.work)
    assert budget.moving_seconds == pytest.approx(decodes_seconds / 2)
    budget.move(decodes_seconds / 3)
    assert budget.moving_seconds == pytest.approx(decodes_seconds / 6)
    budget.move(decodes_seconds)
    assert budget.moving_seconds == 0
    tight = _beside_decodes(machine.learned, decodes_seconds)
    assert tight.moving_seconds == 0


def test_without_decodes_bytes_may_take_any_time() -> None:
    budget = StepBudget(StepCosts(), LIMIT_SECONDS)
    budget.chunk(0, 100)
    assert budget.moving_seconds == math.inf


def test_a_prompt_does_not_spend_its_time_on_gathering_what_lies_before_it() -> None:
    """Each chunk gathers it again, so a chunk's tokens may take as long as that does."""
    costs = StepCosts()
    profile = (12e-3, 1.3e-3, 3e-6, 3e-3, 0.5e-6, 60e-6, 1e-3, 1e-3)
    truth = Machine(profile, math.inf, noise=0.0, learned=costs)
    truth.decode(50)
    n_steps, start = 0, 6000
    while start < 6032:
        budget = StepBudget(costs, stretch=4.0)
        for _ in range(4):
            budget.decode(100)
        start += (allowed := budget.allow(start, 6032 - start))
        budget.chunk(start - allowed, allowed)
        costs.observe(budget.work, truth.seconds(budget.work))
        n_steps += 1
    assert n_steps <= 3


def test_where_bytes_are_moved_less_of_a_prompt_joins() -> None:
    machine = Machine(CPU, LIMIT_SECONDS)
    machine.decode(50)
    machine.prompt(5000)
    alone, beside = _beside_decodes(machine.learned), _beside_decodes(machine.learned)
    beside.move(0.1)
    assert 0 < beside.allow(0, 512) < alone.allow(0, 512)


def _beside_decodes(costs: StepCosts, limit_seconds: float = LIMIT_SECONDS) -> StepBudget:
    return beside(costs, limit_seconds, [100] * 4)


def test_a_slow_model_does_what_a_fast_one_does_in_slow_motion() -> None:
    def chunks(factor: float) -> list[int]:
        costs = StepCosts()
        truth = Machine([factor * cost for cost in CPU], math.inf, noise=0.0, learned=costs)
        truth.decode(50)
        lengths, start = [], 0
        while start < 2000:
            budget = StepBudget(costs, stretch=4.0)
            for _ in range(4):
                budget.decode(100)
            lengths.append(budget.allow(start, 512))
            budget.chunk(start, lengths[-1])
            start += lengths[-1]
            costs.observe(budget.work, truth.seconds(budget.work))
        return lengths

    assert chunks(20.0) == chunks(1.0) == chunks(2000.0)


def test_where_many_wait_for_few_they_wait_for_longer() -> None:
    costs = StepCosts()

    def allowed(batch_rows: int) -> int:
        budget = StepBudget(costs, stretch=4.0, batch_rows=batch_rows)
        budget.decode(100)
        return budget.allow(0, 512)

    assert allowed(8) > allowed(1)
    assert allowed(0) == allowed(1)

"""Which models are loaded and which must go."""

import math
import random
from dataclasses import replace

import pytest

from server.pool.decide import Action, Load, Unload, can_ever_fit, decide, next_due
from server.pool.states import Measuring, ModelState, State

BUDGET = 100
NOW = 1000.0


def ready(need_bytes: int, used_at: float = 0.0, **fields: object) -> ModelState:
    made = ModelState(need_bytes, State.READY, used_at=used_at)
    return replace(made, **fields)  # type: ignore[arg-type]


def wanted(need_bytes: int, since: float = NOW, **fields: object) -> ModelState:
    return replace(ModelState(need_bytes, waiting_since=since), **fields)  # type: ignore[arg-type]


def decided(**models: ModelState) -> list[Action]:
    return decide(models, BUDGET, NOW)


def test_what_is_wanted_is_loaded_where_there_is_room() -> None:
    assert decided(a=wanted(60), b=ready(40)) == [Load("a")]
    assert decided(a=ModelState(60), b=ready(40)) == []


def test_who_asked_first_is_first() -> None:
    models = {"a": wanted(60, NOW - 1), "b": wanted(60, NOW - 2), "c": wanted(40, NOW)}
    assert decide(models, BUDGET, NOW) == [Load("b")], "c would take the room that a waits for"


def test_the_least_recently_used_idle_one_goes() -> None:
    assert decided(a=wanted(50), b=ready(50, 7), c=ready(50, 3)) == [Unload("c")]
    busy = ready(50, 3, n_users=1)
    assert decided(a=wanted(50), b=ready(50, 7), c=busy) == [Unload("b")]


def test_the_fewest_go() -> None:
    assert decided(a=wanted(50), b=ready(10, 1), c=ready(60, 2)) == [Unload("c")]
    models = decided(a=wanted(70), b=ready(10, 1), c=ready(40, 2), d=ready(40, 3))
    assert models == [Unload("c"), Unload("d")]


def test_none_goes_where_that_makes_no_room() -> None:
    assert decided(a=wanted(80), b=ready(50, n_users=1), c=ready(30)) == []


def test_nothing_goes_for_what_is_about_to_fit() -> None:
    draining = ready(60, state=State.DRAINING)
    assert decided(a=wanted(60), b=draining, c=ready(40)) == []


def test_one_in_use_goes_when_another_has_waited_as_long_as_loading_both_takes() -> None:
    busy = ready(60, n_users=3, load_seconds=4.0)
    patient = wanted(60, NOW - 6.9, load_seconds=3.0)
    assert decided(a=patient, b=busy) == []
    assert next_due({"a": patient, "b": busy}, NOW) == NOW - 6.9 + 7.0
    assert decided(a=replace(patient, waiting_since=NOW - 7.0), b=busy) == [Unload("b")]


def test_what_is_pinned_stays() -> None:
    assert decided(a=wanted(60, NOW - 99), b=ready(60, is_pinned=True, keep_until=1.0)) == []
    models = {"a": ModelState(60), "b": ready(60, is_pinned=True)}
    assert not can_ever_fit(models, "a", BUDGET)
    assert can_ever_fit(models, "a", 120)


def test_what_is_pinned_is_loaded_again_after_its_death() -> None:
    dead = ModelState(60, State.FAILED, retry_at=NOW + 5, is_pinned=True)
    assert decided(a=dead) == []
    assert next_due({"a": dead}, NOW) == NOW + 5
    assert decided(a=replace(dead, retry_at=NOW)) == [Load("a")]
    assert decided(a=replace(dead, retry_at=NOW, is_pinned=False)) == []


def test_a_pinned_model_of_unknown_size_is_not_loaded() -> None:
    unknown = ModelState(0, State.FAILED, is_pinned=True, measuring=Measuring.NOT_YET)
    assert decided(a=unknown, b=wanted(100)) == [Load("b")]


def test_age_unloads_what_is_idle() -> None:
    model = ready(60, used_at=NOW - 10, keep_until=NOW)
    assert decided(a=model) == [Unload("a")]
    assert decided(a=replace(model, n_users=1)) == []
    young = replace(model, keep_until=NOW + 0.5)
    assert decided(a=young) == []
    assert next_due({"a": young}, NOW) == NOW + 0.5


def test_a_failed_one_is_not_loaded_before_its_time() -> None:
    failed = wanted(60, state=State.FAILED, retry_at=NOW + 1)
    assert decided(a=failed) == []
    assert decided(a=replace(failed, retry_at=NOW)) == [Load("a")]


def test_what_takes_more_than_it_should_makes_idle_ones_go() -> None:
    assert decided(a=ready(80, n_users=1), b=ready(30)) == [Unload("b")]


def test_there_may_be_nothing_to_wait_for() -> None:
    assert next_due({"a": ready(1), "b": ModelState(1)}, NOW) == math.inf


class Machine:
    """Takes the actions, and lets random things happen to a pool."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.models = {
            f"m{index}": ModelState(
                self.random.randint(10, 90),
                load_seconds=self.random.choice([0.5, 5.0]),
            )
            for index in range(self.random.randint(1, 6))
        }
        self.waiting = dict.fromkeys(self.models, 0)

    def set(self, name: str, **changes: object) -> None:
        self.models[name] = replace(self.models[name], **changes)  # type: ignore[arg-type]

    def turn(self) -> None:
        for action in decide(self.models, BUDGET, self.now):
            model = self.models[action.name]
            match action:
                case Load():
                    assert not model.is_resident, "two loads of one model"
                    self.set(action.name, state=State.LOADING)
                case Unload():
                    assert model.state is State.READY
                    self.set(action.name, state=State.DRAINING)
        taken = sum(model.need_bytes for model in self.models.values() if model.is_resident)
        assert taken <= BUDGET

    def happen(self) -> None:
        name = self.random.choice(list(self.models))
        match self.models[name].state:
            case State.LOADING:
                self.loads(name)
            case State.READY | State.DRAINING if self.models[name].n_users:
                self.ends(name)
            case State.DRAINING:
                self.set(name, state=State.UNLOADED)
            case State.READY if self.random.random() < 0.01:
                self.set(name, state=State.FAILED, retry_at=self.now + 1)
        self.now += self.random.expovariate(2)
        self.turn()

    def loads(self, name: str) -> None:
        if self.random.random() < 0.05:
            self.waiting[name] = 0
            self.set(name, state=State.FAILED, retry_at=self.now + 2, waiting_since=None)
            return
        users, self.waiting[name] = self.waiting[name], 0
        times = {"used_at": self.now, "keep_until": self.now + self.random.choice([0.0, 5.0])}
        self.set(name, state=State.READY, n_users=users, waiting_since=None, **times)

    def ends(self, name: str) -> None:
        """One use ends, with a wish of its own to keep the model."""
        model, seconds = self.models[name], self.random.choice([0.0, 5.0, 50.0, math.inf])
        keep_until = max(model.keep_until, self.now + seconds)
        self.set(name, n_users=model.n_users - 1, used_at=self.now, keep_until=keep_until)

    def arrive(self) -> None:
        name = self.random.choice(list(self.models))
        model = self.models[name]
        if not can_ever_fit(self.models, name, BUDGET):
            return
        if model.state is State.READY:
            self.set(name, n_users=model.n_users + 1)
        else:
            self.waiting[name] += 1
            if model.waiting_since is None:
                self.set(name, waiting_since=self.now)
        self.turn()

    def settle(self) -> None:
        """Nobody comes any more: all that wait are served."""
        for _ in range(10_000):
            if not any(self.waiting.values()):
                return
            self.happen()
        raise AssertionError(f"these wait for ever: {self.models}")


@pytest.mark.parametrize("seed", range(50))
def test_never_over_the_budget_never_two_loads_and_every_request_ends(seed: int) -> None:
    machine = Machine(seed)
    for _ in range(2_000):
        if machine.random.random() < 0.4:
            machine.arrive()
        machine.happen()
    machine.settle()
    for name, model in machine.models.items():
        assert model.waiting_since is None or not machine.waiting[name]

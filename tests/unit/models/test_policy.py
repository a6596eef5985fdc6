"""Which models are loaded and which must go."""

import math
from dataclasses import replace
from typing import Any

from server.models.policy import (
    Absent,
    Action,
    Draining,
    Failed,
    Load,
    ModelState,
    Need,
    Queued,
    Ready,
    Unload,
    can_ever_fit,
    decide,
    next_due,
)

BUDGET = 100
NOW = 1000.0


def ready(need_bytes: int, used_at: float = 0.0, **fields: Any) -> Ready:
    usage = {name: fields.pop(name) for name in ("n_leases", "keep_until") if name in fields}
    return Ready(Need(need_bytes, **fields), used_at, **usage)


def queued(need_bytes: int, since: float = NOW, **fields: Any) -> Queued:
    return Queued(Need(need_bytes, **fields), since)


def absent(need_bytes: int) -> Absent:
    return Absent(Need(need_bytes))


def decided(**models: ModelState) -> list[Action]:
    return decide(models, BUDGET, NOW)


def test_what_is_queued_is_loaded_where_there_is_room() -> None:
    assert decided(a=queued(60), b=ready(40)) == [Load("a", Need(60))]
    assert decided(a=absent(60), b=ready(40)) == []


def test_who_asked_first_is_first() -> None:
    models = {"a": queued(60, NOW - 1), "b": queued(60, NOW - 2), "c": queued(40, NOW)}
    loads = decide(models, BUDGET, NOW)
    assert loads == [Load("b", Need(60))], "c would take the room that a waits for"


def test_the_least_recently_used_idle_one_goes() -> None:
    assert decided(a=queued(50), b=ready(50, 7), c=ready(50, 3)) == [Unload("c")]
    busy = ready(50, 3, n_leases=1)
    assert decided(a=queued(50), b=ready(50, 7), c=busy) == [Unload("b")]


def test_the_fewest_go() -> None:
    assert decided(a=queued(50), b=ready(10, 1), c=ready(60, 2)) == [Unload("c")]
    models = decided(a=queued(70), b=ready(10, 1), c=ready(40, 2), d=ready(40, 3))
    assert models == [Unload("c"), Unload("d")]


def test_none_goes_where_that_makes_no_room() -> None:
    assert decided(a=queued(80), b=ready(50, n_leases=1), c=ready(30)) == []


def test_nothing_goes_for_what_is_about_to_fit() -> None:
    assert decided(a=queued(60), b=Draining(Need(40)), c=ready(40)) == []


def test_one_in_use_goes_when_another_has_waited_as_long_as_loading_both_takes() -> None:
    busy = ready(60, n_leases=3, load_seconds=4.0)
    patient = queued(60, NOW - 6.9, load_seconds=3.0)
    assert decided(a=patient, b=busy) == []
    assert next_due({"a": patient, "b": busy}, NOW) == NOW - 6.9 + 7.0
    assert decided(a=replace(patient, since=NOW - 7.0), b=busy) == [Unload("b")]


def test_what_is_pinned_stays() -> None:
    assert decided(a=queued(60, NOW - 99), b=ready(60, is_pinned=True, keep_until=1.0)) == []
    models: dict[str, ModelState] = {"a": absent(60), "b": ready(60, is_pinned=True)}
    assert not can_ever_fit(models, "a", Need(60), BUDGET)
    assert can_ever_fit(models, "a", Need(60), 120)


def test_what_is_pinned_is_loaded_again_after_its_death() -> None:
    need = Need(60, is_pinned=True)
    dead = Failed(need, "killed", retry_at=NOW + 5)
    assert decided(a=dead) == []
    assert next_due({"a": dead}, NOW) == NOW + 5
    assert decided(a=replace(dead, retry_at=NOW)) == [Load("a", need)]
    assert decided(a=Failed(Need(60), "killed", retry_at=NOW)) == []


def test_what_is_pinned_ends_no_requests_after_its_death() -> None:
    dead = Failed(Need(60, is_pinned=True), "killed", retry_at=0.0)
    assert decided(a=dead, b=ready(60, n_leases=1)) == []
    assert decided(a=dead, b=ready(60)) == [Unload("b")]


def test_a_pinned_model_of_unknown_size_is_not_loaded() -> None:
    unmeasured = Failed(None, "no config.json", retry_at=0.0)
    assert decided(a=unmeasured, b=queued(100)) == [Load("b", Need(100))]


def test_age_unloads_what_is_idle() -> None:
    model = ready(60, used_at=NOW - 10, keep_until=NOW)
    assert decided(a=model) == [Unload("a")]
    assert decided(a=replace(model, n_leases=1)) == []
    young = replace(model, keep_until=NOW + 0.5)
    assert decided(a=young) == []
    assert next_due({"a": young}, NOW) == NOW + 0.5


def test_what_takes_more_than_it_should_makes_idle_ones_go() -> None:
    assert decided(a=ready(80, n_leases=1), b=ready(30)) == [Unload("b")]


def test_there_may_be_nothing_to_wait_for() -> None:
    assert next_due({"a": ready(1), "b": absent(1)}, NOW) == math.inf

"""Drafts that would not pay are tried all the same, ever more rarely."""

from engine.drafts.policy import DraftableRow, Probes


def row(*chances: float) -> DraftableRow:
    return DraftableRow(chances, 0.0, 0.1)


def taken(probes: Probes, rows: list[DraftableRow], most_tokens: int = 100) -> list[int]:
    """What is verified of the next step."""
    probes.count_step()
    return probes.take(rows, most_tokens)


def probed_at(probes: Probes, n_steps: int, rows: list[DraftableRow]) -> list[int]:
    return [step for step in range(1, n_steps + 1) if any(taken(probes, rows))]


def test_probes_grow_rarer() -> None:
    steps = probed_at(Probes(), 3000, [row(0.9, 0.8)])
    gaps = [after - before for before, after in zip([0, *steps], steps, strict=False)]
    assert gaps == [4, 8, 16, 32, 64, 128, 256, 512, 512, 512, 512]


def test_they_are_as_frequent_as_before_when_drafts_have_paid() -> None:
    probes = Probes()
    probed_at(probes, 100, [row(1.0)])
    probes.paid()
    assert probed_at(probes, 5, [row(1.0)]) == [4]


def test_the_likeliest_draft_is_tried_and_no_more_than_fits() -> None:
    rows = [row(0.9, 0.2), row(*[0.9] * 32), row(0.9, 0.8)]
    probes = Probes()
    tried = [counts for _ in range(12) if any(counts := taken(probes, rows))]
    assert tried == [[0, 8, 0], [0, 8, 0]]
    probes.paid()
    assert [taken(probes, rows, most_tokens=3) for _ in range(4)][-1] == [0, 3, 0]


def test_what_would_hardly_give_a_token_is_not_tried() -> None:
    probes = Probes()
    assert probed_at(probes, 1000, [row(0.6, 0.3), row()]) == []
    assert probed_at(probes, 1, [row(0.9, 0.8)]) == [1], "it waits for one that would"


def test_who_waits_for_a_probe_gets_it() -> None:
    """A step is collected early for it, before its rows are known."""
    probes, rows = Probes(), [row(0.9, 0.8)]
    for _ in range(4):
        assert not probes.is_due(rows)
        probes.count_step()
    assert probes.is_due(rows)
    assert probes.is_due(rows), "to ask changes nothing"
    assert probes.take(rows, 100) == [2]
    assert not probes.is_due(rows)

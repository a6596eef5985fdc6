"""Trials of grammars, in workers that a test speaks for."""

import asyncio
from collections.abc import Callable

import pytest

from engine.api import EngineStopped, NoGrammars
from engine.grammar import answers
from engine.grammar.answers import TRIAL_TOO_COSTLY, Verdict
from engine.grammar.pool import MOST_FRUITLESS
from engine.grammar.queue import TRIAL_SECONDS, patience_seconds
from engine.grammar.wire import JobReport, ReportKind, WireMessage
from engine.values.request import Grammar, GrammarKind
from tests.unit.grammar.scripted import CRASH, LIMIT, OUTSIDE, Scene, matcher

COSTLY = Verdict(TRIAL_TOO_COSTLY, TRIAL_SECONDS)


async def tried(scene: Scene, text: str, client: str = "a") -> "asyncio.Task[Verdict]":
    async def verdict() -> Verdict:
        grammar = Grammar(GrammarKind.REGEX, text)
        return (await scene.trials.of(client, [grammar]))[grammar]

    task = asyncio.ensure_future(verdict())
    await asyncio.sleep(0)
    return task


def texts(requests: list[WireMessage]) -> list[str]:
    return [request["text"] for request in requests]


async def test_a_verdict_is_kept(scene: Scene) -> None:
    asked = await tried(scene, "x")
    (job,) = scene.requests(0)
    assert (job["do"], job["text"], job["seconds"]) == ("try", "x", TRIAL_SECONDS)
    scene.verdict(0, job, "no good", 0.5)
    assert await asked == Verdict("no good", 0.5)
    assert await (await tried(scene, "x", "b")) == Verdict("no good", 0.5)
    assert not scene.requests(0)


async def test_the_verdict_that_was_used_least_recently_is_forgotten(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schema of every request is not forgotten for grammars that come once."""
    monkeypatch.setattr(answers, "KEPT_VERDICTS", 2)
    for text in ("every", "once", "every", "twice"):
        asked = await tried(scene, text)
        for job in scene.requests(0):
            scene.verdict(0, job)
        await asked
    known = await tried(scene, "every")
    assert known.done() or not scene.requests(0)
    assert (await known).error is None
    await tried(scene, "once")
    assert texts(scene.requests(0)) == ["once"]


async def test_a_matcher_is_opened_in_the_worker_that_tried_its_grammar(scene: Scene) -> None:
    """So a grammar is compiled once."""
    for client, text in (("a", "x"), ("b", "y")):
        await tried(scene, text, client)
        scene.turn()
    for process, seconds in ((1, 0.001), (0, 1.0)):
        scene.verdict(process, scene.job(process), seconds=seconds)
    scene.ask(0, "a", matcher(1.0, text="x"))
    scene.ask(1, "b", matcher(text="y"))
    scene.ask(2, "c", matcher(text="y"))
    assert texts(scene.requests(0)) == ["x"]
    assert texts(scene.requests(1)) == ["y", "y"]
    assert len(scene.starts.started) == 2


Fate = Callable[[Scene, int, WireMessage], None]
"""What becomes of a worker that tries a grammar: given its number and its job."""


def dies(exit_code: int) -> Fate:
    return lambda scene, life, job: scene.lose(life, exit_code)


def says(said: ReportKind) -> Fate:
    def report(scene: Scene, life: int, job: WireMessage) -> None:
        scene.process(life).report(JobReport(said, job["id"]))
        scene.turn()

    return report


def is_stuck(scene: Scene, life: int, job: WireMessage) -> None:
    """It has as long as a trial takes on a busy machine."""
    scene.now += patience_seconds(TRIAL_SECONDS)
    scene.turn()
    assert not scene.process(life).is_over
    scene.now += 1
    scene.turn()
    assert scene.process(life).is_over


def succeeds(scene: Scene, life: int, job: WireMessage) -> None:
    scene.verdict(life, job, seconds=0.1)


@pytest.mark.parametrize(
    ("fates", "verdict"),
    [
        pytest.param([dies(LIMIT)], COSTLY, id="meets its full limit"),
        pytest.param([dies(CRASH), dies(CRASH)], COSTLY, id="crashes twice, then alone"),
        pytest.param([dies(CRASH), succeeds], Verdict(None, 0.1), id="succeeds alone"),
        pytest.param([is_stuck, is_stuck], COSTLY, id="is stuck twice"),
        *(
            pytest.param([fate] * MOST_FRUITLESS, None, id=name)
            for name, fate in {
                "is killed from outside": dies(OUTSIDE),
                "says complete": says(ReportKind.COMPLETE),
                "says a mask": says(ReportKind.MASK),
                "says it is ready": says(ReportKind.READY),
            }.items()
        ),
    ],
)
async def test_what_becomes_of_a_trial_whose_workers_end(
    scene: Scene, fates: list[Fate], verdict: Verdict | None
) -> None:
    """A grammar that ends workers is too costly for good. Where it is not to blame, it is tried
    again until no worker has succeeded too often, and anew for who asks later.
    """
    asked = await tried(scene, "x")
    for life, fate in enumerate(fates):
        assert not asked.done()
        job = scene.job(life)
        assert job["text"] == "x"
        fate(scene, life, job)
    if verdict is None:
        with pytest.raises(NoGrammars):
            await asked
    else:
        assert await asked == verdict
    again = await tried(scene, "x")
    if verdict is None:
        scene.verdict(len(fates), scene.job(len(fates)), seconds=0.1)
    assert await again == (verdict or Verdict(None, 0.1))
    assert len(scene.starts.started) == len(fates) + (verdict is None)


async def test_where_no_process_starts_nobody_waits(scene: Scene) -> None:
    scene.starts.is_possible = False
    asked = await tried(scene, "x")
    for _ in range(MOST_FRUITLESS):
        scene.turn()
    with pytest.raises(NoGrammars):
        await asked


async def test_one_that_was_killed_between_two_trials_is_replaced(scene: Scene) -> None:
    asked = await tried(scene, "x")
    scene.verdict(0, scene.job(0))
    await asked
    scene.lose(0)
    again = await tried(scene, "y")
    scene.verdict(1, scene.job(1))
    assert (await again).error is None


async def test_a_client_has_one_trial_at_a_time_and_another_goes_beside_it(scene: Scene) -> None:
    first, second = await tried(scene, "x"), await tried(scene, "y")
    (slow,) = scene.requests(0)
    other = await tried(scene, "z", "b")
    scene.turn()
    (quick,) = scene.requests(1)
    assert quick["text"] == "z"
    scene.verdict(1, quick)
    assert (await other).error is None
    assert not scene.requests(1)
    assert not second.done()
    scene.verdict(0, slow, seconds=0.2)
    assert (await first).seconds == 0.2
    second.cancel()


async def test_who_has_gone_is_tried_no_more(scene: Scene) -> None:
    first, gone, last = [await tried(scene, text) for text in "xyz"]
    (job,) = scene.requests(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    scene.verdict(0, job)
    await first
    (job,) = scene.requests(0)
    assert job["text"] == "z"
    scene.verdict(0, job)
    await last
    assert not scene.trials._waiting, "the grammar may be long"
    assert not scene.pool._waiting


async def test_the_verdict_of_a_trial_whose_client_has_gone_is_kept(scene: Scene) -> None:
    gone = await tried(scene, "x")
    (job,) = scene.requests(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    scene.verdict(0, job, "no good")
    assert (await (await tried(scene, "x"))).error == "no good"


async def test_what_is_asked_for_twice_is_tried_once(scene: Scene) -> None:
    first, second = await tried(scene, "x"), await tried(scene, "x")
    scene.verdict(0, scene.job(0), "no good")
    assert (await first).error == (await second).error == "no good"
    assert not scene.requests(0)


async def test_closed_it_tries_nothing_more(scene: Scene) -> None:
    running, waiting = await tried(scene, "x"), await tried(scene, "y")
    scene.turn()
    scene.pool.close()
    for task in (running, waiting, await tried(scene, "z")):
        with pytest.raises(EngineStopped):
            await task

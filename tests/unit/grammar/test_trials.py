"""Trials of grammars, in workers that a test speaks for."""

import asyncio

import pytest

from engine.api import EngineStopped, NoGrammars
from engine.grammar.answers import TRIAL_TOO_COSTLY, Verdict
from engine.grammar.pool import MOST_FRUITLESS, patience_seconds
from engine.grammar.queue import TRIAL_SECONDS
from engine.grammar.wire import Message, Report, Said
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


def texts(requests: list[Message]) -> list[str]:
    return [request["text"] for request in requests]


async def test_a_verdict_is_kept(scene: Scene) -> None:
    asked = await tried(scene, "x")
    (job,) = scene.requests(0)
    assert (job["do"], job["text"], job["seconds"]) == ("try", "x", TRIAL_SECONDS)
    scene.verdict(0, job, "no good", 0.5)
    assert await asked == Verdict("no good", 0.5)
    assert await (await tried(scene, "x", "b")) == Verdict("no good", 0.5)
    assert not scene.requests(0)


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


async def test_a_grammar_that_meets_its_full_limit_is_too_costly_for_good(scene: Scene) -> None:
    asked = await tried(scene, "x")
    scene.turn()
    scene.lose(0, LIMIT)
    assert await asked == COSTLY
    assert await (await tried(scene, "x")) == COSTLY
    assert len(scene.starts.started) == 1


async def test_a_grammar_that_ends_a_worker_is_tried_again_alone_and_then_refused(
    scene: Scene,
) -> None:
    asked = await tried(scene, "x")
    scene.turn()
    scene.lose(0, CRASH)
    assert texts(scene.requests(1)) == ["x"]
    assert not asked.done()
    scene.lose(1, CRASH)
    assert await asked == COSTLY


async def test_the_second_try_alone_may_succeed(scene: Scene) -> None:
    asked = await tried(scene, "x")
    scene.turn()
    scene.lose(0, CRASH)
    scene.verdict(1, scene.job(1))
    assert (await asked).error is None


async def test_a_process_that_is_killed_from_outside_says_nothing_of_the_grammar(
    scene: Scene,
) -> None:
    asked = await tried(scene, "x")
    for life in range(MOST_FRUITLESS):
        assert texts(scene.requests(life)) == ["x"]
        assert not asked.done()
        scene.lose(life, OUTSIDE)
    with pytest.raises(NoGrammars):
        await asked
    again = await tried(scene, "x")
    scene.verdict(MOST_FRUITLESS, scene.job(MOST_FRUITLESS), seconds=0.1)
    assert await again == Verdict(None, 0.1)


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


async def test_a_trial_has_as_long_as_it_takes_on_a_busy_machine(scene: Scene) -> None:
    asked = await tried(scene, "x")
    scene.turn()
    scene.now = patience_seconds(TRIAL_SECONDS)
    scene.turn()
    assert not scene.process(0).is_over
    scene.now += 1
    scene.turn()
    assert scene.process(0).is_over
    scene.turn()
    scene.now += patience_seconds(TRIAL_SECONDS) + 1
    scene.turn()
    assert await asked == COSTLY


@pytest.mark.parametrize("said", [Said.COMPLETE, Said.MASK, Said.READY])
async def test_a_process_that_makes_no_sense_is_no_verdict(scene: Scene, said: Said) -> None:
    asked = await tried(scene, "x")
    for life in range(MOST_FRUITLESS):
        (job,) = scene.requests(life)
        scene.process(life).report(Report(said, job["id"]))
        scene.turn()
    with pytest.raises(NoGrammars):
        await asked


async def test_where_no_process_starts_nobody_waits(scene: Scene) -> None:
    scene.starts.is_possible = False
    asked = await tried(scene, "x")
    for _ in range(MOST_FRUITLESS):
        scene.turn()
    with pytest.raises(NoGrammars):
        await asked


async def test_closed_it_tries_nothing_more(scene: Scene) -> None:
    running, waiting = await tried(scene, "x"), await tried(scene, "y")
    scene.turn()
    scene.pool.close()
    for task in (running, waiting, await tried(scene, "z")):
        with pytest.raises(EngineStopped):
            await task

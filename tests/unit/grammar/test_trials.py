"""Trials of grammars, in processes that a test speaks for."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.api import EngineStopped, NoGrammars
from engine.grammar.remote import trials
from engine.grammar.remote.process import BUSY_FACTOR, STUCK_SECONDS
from engine.grammar.remote.trials import TOO_COSTLY, TRIAL_SECONDS, Trials, Verdict
from engine.grammar.remote.wire import Said
from engine.values.request import Grammar, GrammarKind
from tests.unit.grammar.scripted import OUTSIDE, ScriptedProcess, Starts


class Stage:
    def __init__(self) -> None:
        self.starts = Starts()
        self.trials = Trials(self.starts)

    def ask(self, text: str, client: str = "a") -> "asyncio.Task[Verdict]":
        async def asked() -> Verdict:
            grammar = Grammar(GrammarKind.REGEX, text)
            return (await self.trials.of(client, [grammar]))[grammar]

        return asyncio.ensure_future(asked())

    async def process(self, number: int = 0) -> ScriptedProcess:
        """When it has been started, and its warm-up answered."""
        found = await asyncio.to_thread(self.starts.wait_for, number)
        assert (await self.heard(found))["do"] == "try"
        found.report(Said.VERDICT, error=None, seconds=0.0)
        return found

    async def heard(self, process: ScriptedProcess) -> dict[str, object]:
        return await asyncio.to_thread(process.heard)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    yield made
    made.trials.close()
    made.starts.close()


async def test_a_verdict_is_kept(stage: Stage) -> None:
    asked = stage.ask("x")
    process = await stage.process()
    assert (await stage.heard(process))["text"] == "x"
    process.report(Said.VERDICT, error="no good", seconds=0.5)
    assert await asked == Verdict("no good", 0.5)
    assert await stage.ask("x", "b") == Verdict("no good", 0.5)


async def test_a_grammar_that_ends_its_process_is_too_costly_for_good(stage: Stage) -> None:
    asked = stage.ask("x")
    process = await stage.process()
    await stage.heard(process)
    process.die()
    assert await asked == Verdict(TOO_COSTLY, TRIAL_SECONDS)
    assert await stage.ask("x") == Verdict(TOO_COSTLY, TRIAL_SECONDS)
    assert len(stage.starts.started) == 1


async def test_a_process_that_is_killed_from_outside_says_nothing_of_the_grammar(
    stage: Stage,
) -> None:
    asked = stage.ask("x")
    process = await stage.process()
    await stage.heard(process)
    process.die(OUTSIDE)
    with pytest.raises(NoGrammars):
        await asked
    again = stage.ask("x")
    process = await stage.process(1)
    await stage.heard(process)
    process.report(Said.VERDICT, error=None, seconds=0.1)
    assert await again == Verdict(None, 0.1)


async def test_one_that_was_killed_between_two_trials_is_replaced(stage: Stage) -> None:
    asked = stage.ask("x")
    process = await stage.process()
    await stage.heard(process)
    process.report(Said.VERDICT, error=None, seconds=0.1)
    await asked
    process.die()
    again = stage.ask("y")
    process = await stage.process(1)
    await stage.heard(process)
    process.report(Said.VERDICT, error=None, seconds=0.1)
    assert await again == Verdict(None, 0.1)


async def test_a_client_has_one_trial_at_a_time_and_another_goes_beside_it(stage: Stage) -> None:
    first, second = stage.ask("x"), stage.ask("y")
    slow = await stage.process()
    assert (await stage.heard(slow))["text"] == "x"
    other = stage.ask("z", "b")
    quick = await stage.process(1)
    assert (await stage.heard(quick))["text"] == "z"
    quick.report(Said.VERDICT, error=None, seconds=0.1)
    assert await other == Verdict(None, 0.1)
    assert not quick.asked()
    assert not second.done()
    slow.report(Said.VERDICT, error=None, seconds=0.2)
    assert (await first).seconds == 0.2
    second.cancel()


async def test_who_has_gone_is_tried_no_more(stage: Stage) -> None:
    first, gone, last = stage.ask("x"), stage.ask("y"), stage.ask("z")
    process = await stage.process()
    await stage.heard(process)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    process.report(Said.VERDICT, error=None, seconds=0.1)
    await first
    assert (await stage.heard(process))["text"] == "z"
    process.report(Said.VERDICT, error=None, seconds=0.1)
    await last


async def test_who_has_gone_leaves_nothing_behind(stage: Stage) -> None:
    """The grammar may be long, and his turn far away."""
    first, gone = stage.ask("x"), stage.ask("y")
    process = await stage.process()
    await stage.heard(process)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert stage.trials._turns.close() == []
    process.report(Said.VERDICT, error=None, seconds=0.1)
    await first


async def test_a_trial_has_as_long_as_it_takes_on_a_busy_machine(stage: Stage) -> None:
    asked = stage.ask("x")
    process = await stage.process()
    await stage.heard(process)
    assert process.connection.gettimeout() == STUCK_SECONDS + BUSY_FACTOR * TRIAL_SECONDS
    process.report(Said.VERDICT, error=None, seconds=0.1)
    await asked


async def test_a_grammar_over_which_its_process_is_stuck_is_too_costly(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "patience_seconds", lambda seconds: 0.001)
    asked = stage.ask("x")
    process = await stage.process()
    assert await asked == Verdict(TOO_COSTLY, TRIAL_SECONDS)
    assert process.is_over


@pytest.mark.parametrize(
    ("said", "fields"),
    [(Said.STOPPED, {}), (Said.VERDICT, {}), (Said.VERDICT, {"error": 1, "seconds": 0.0})],
)
async def test_a_process_that_makes_no_sense_is_no_verdict(
    stage: Stage, said: Said, fields: dict[str, object]
) -> None:
    asked = stage.ask("x")
    process = await stage.process()
    await stage.heard(process)
    process.report(said, **fields)
    with pytest.raises(NoGrammars):
        await asked


async def test_where_no_process_starts_nobody_waits(stage: Stage) -> None:
    stage.starts.is_possible = False
    with pytest.raises(NoGrammars, match="no more processes"):
        await stage.ask("x")


async def test_closed_it_tries_nothing_more(stage: Stage) -> None:
    first, waiting = stage.ask("x"), stage.ask("y")
    process = await stage.process()
    await stage.heard(process)
    stage.trials.close()
    with pytest.raises(EngineStopped):
        await waiting
    with pytest.raises(EngineStopped):
        await stage.ask("z")
    process.report(Said.VERDICT, error=None, seconds=0.1)
    assert (await first).seconds == 0.1

"""What raises in the host's code of one sequence ends that sequence, and no other."""

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest

import engine.core.admission
import engine.core.scheduler
from engine.core.inbox import Inbox
from engine.core.loop import EngineLoop
from engine.core.sequence import LiveSequence
from engine.drafts.sources import Draft
from engine.grammar.stage import GrammarStage
from engine.grammar.state import GrammarState
from engine.values.output import FinishReason
from kvstore import invariants
from kvstore.sizes import StorageBytes
from tests.simulation.host_faults import FaultyDetokenizer, FaultyState, InjectedPanic
from tests.unit.engine_harness import Harness, prompt
from tests.unit.test_loop import ANYTHING, Answers
from tests.unit.test_readmitted import guided_plan


class Broken(Exception):
    """What the code of one sequence raises."""


Place = Callable[[LiveSequence, pytest.MonkeyPatch, Callable[[], None]], None]
"""Makes the code of a sequence in one place raise."""


def _text(sequence: LiveSequence, patch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    sequence.output._detokenizer = FaultyDetokenizer(sequence.output._detokenizer, fail)


def _draft(sequence: LiveSequence, patch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    def make_draft(output: Sequence[int], most: int) -> Draft | None:
        fail()
        return None

    Harness.set_drafter(sequence, make_draft)


def _accepted(sequence: LiveSequence, patch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    Harness.set_drafter(sequence, lambda output, most: None)
    assert sequence.proposer is not None
    patch.setattr(type(sequence.proposer), "accept", _only(sequence.proposer, fail))


def _state(sequence: LiveSequence, patch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    plan = guided_plan(sequence.request)
    sequence.grammar = FaultyState(GrammarState(plan), fail)


def _row(sequence: LiveSequence, patch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    _replace(patch, "prefill_row", sequence, fail)


def _entry(sequence: LiveSequence, patch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    _replace(patch, "batch_entry", sequence, fail)


def _masks(sequence: LiveSequence, patch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    sequence.grammar = GrammarState(guided_plan(sequence.request))
    banned = LiveSequence.banned_tokens

    def banned_tokens(each: LiveSequence, n_draft: int = 0) -> tuple[int, ...]:
        if each is sequence and each.pending is not None:
            fail()
        return banned(each, n_draft)

    patch.setattr(LiveSequence, "banned_tokens", banned_tokens)


def _admission(sequence: LiveSequence, patch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    _replace(patch, "_queued_prompt", sequence, fail, engine.core.admission)


def _replace(
    patch: pytest.MonkeyPatch,
    name: str,
    sequence: LiveSequence,
    fail: Callable[[], None],
    module: ModuleType = engine.core.scheduler,
) -> None:
    """Have a function of the module raise for this sequence."""
    function = getattr(module, name)

    def replaced(each: LiveSequence, *arguments: int) -> object:
        if each is sequence:
            fail()
        return function(each, *arguments)

    patch.setattr(module, name, replaced)


def _only(own: object, fail: Callable[[], None]) -> Callable[[object, int], None]:
    """A method that raises for the object `own`."""

    def method(each: object, token_id: int) -> None:
        if each is own:
            fail()

    return method


PLACES: dict[str, Place] = {
    "text": _text,
    "draft": _draft,
    "accepted draft": _accepted,
    "grammar": _state,
    "row": _row,
    "entry": _entry,
    "masks": _masks,
    "admission": _admission,
}


@pytest.mark.parametrize(
    "error", [Broken("broken"), InjectedPanic("broken")], ids=["error", "panic"]
)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("n_passed", [0, 1, 3])
def test_an_error_of_one_sequence_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, place: Place, error: BaseException, n_passed: int
) -> None:
    harness = Harness(n_blocks=64, block_size=4, step_tokens=4, max_running=4)
    stage = GrammarStage(harness.scheduler, Answers(ANYTHING, [0.0]), lambda: 0.0)
    storage = StorageBytes(0, (), 0)
    loop = EngineLoop(harness.scheduler, harness.runner, Inbox(), harness.take, storage, stage)
    alone = Harness(n_blocks=64, block_size=4)
    wanted = alone.output(alone.serve(prompt(1, 10), 20))
    good = harness.add(prompt(1, 10), 20)
    bad = harness.add(prompt(2, 10), 20)
    sequence = harness.sequence(bad)
    n_calls = 0

    def fail() -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls > n_passed:
            raise error

    place(sequence, monkeypatch, fail)
    harness.scheduler.sequences.n_guided += sequence.grammar is not None
    for _ in range(200):
        if loop.is_idle:
            break
        loop.turn()
        invariants.check(harness.store)
    invariants.check_idle(harness.store)
    if n_calls > n_passed:
        assert harness.reason(bad) is FinishReason.ERROR
        assert "broken" in (harness.end(bad).error or "")
        assert harness.usage(bad).completion_tokens == len(harness.output(bad))
    else:  # a sequence enters the batch once
        assert n_passed > 0
        assert harness.reason(bad) is FinishReason.LENGTH
    assert harness.output(good) == wanted
    assert harness.reason(good) is FinishReason.LENGTH

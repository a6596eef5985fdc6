"""Steps that verify drafts: the same output in fewer steps, at no other sequence's expense."""

from collections.abc import Sequence
from typing import Any

import pytest

from engine.core.budget import StepShape
from engine.core.sequence import Step
from engine.core.step import NO_STEP_MASKS, Verify
from engine.values.output import FinishReason
from engine.values.request import SamplingParams
from engine.values.stats import DraftSource
from kvstore.recurrent import RecurrentGroup, RoundedGroup
from kvstore.types import Namespace
from kvstore.window import WindowGroup
from tests.simulation.fake_runner import InjectedError
from tests.simulation.model import text_of
from tests.unit.engine_harness import Harness, has_draft, prompt, row_tokens
from tests.unit.kv_helpers import tree_of
from tests.unit.scripted_drafter import ScriptedDrafter

N_TOKENS = 40
NAME = "request-0"
PROMPT = prompt(1, 10)


def truth(n_tokens: int = N_TOKENS, stop: Sequence[str] = ()) -> list[int]:
    """Return what is generated after the prompt without drafts."""
    harness = Harness()
    return harness.output(harness.serve(PROMPT, n_tokens, stop=tuple(stop)))


def wrong(tokens: Sequence[int], *places: int) -> list[int]:
    return [(token + 1) % 49 if at in places else token for at, token in enumerate(tokens)]


def begun(script: Sequence[int], harness: Harness | None = None, **options: Any) -> Harness:
    """A request whose drafter expects the script, called NAME."""
    harness = harness or Harness()
    request_id = harness.add(PROMPT, **{"max_tokens": N_TOKENS, **options})
    assert request_id == NAME
    harness.speculate(request_id, ScriptedDrafter(script))
    return harness


def drafted(script: Sequence[int], harness: Harness | None = None, **options: Any) -> Harness:
    """That request has been served."""
    harness = begun(script, harness, **options)
    harness.finish()
    return harness


def recurrent(n_saved: int = 4) -> RecurrentGroup:
    return RecurrentGroup(n_running=4, n_saved=n_saved, block_size=4, interval_tokens=8)


def test_right_drafts_save_steps() -> None:
    harness = drafted(truth())
    assert harness.output(NAME) == truth()
    assert harness.scheduler.metrics.steps < N_TOKENS // 3
    usage = harness.usage(NAME)
    assert usage.accepted_draft_tokens > 2 * N_TOKENS // 3
    assert usage.rejected_draft_tokens == 0


@pytest.mark.parametrize("places", [(0,), (5,), (2, 3, 17), tuple(range(N_TOKENS))])
def test_wrong_drafts_do_not_change_the_output(places: tuple[int, ...]) -> None:
    harness = drafted(wrong(truth(), *places))
    assert harness.output(NAME) == truth()
    usage = harness.usage(NAME)
    assert usage.completion_tokens == N_TOKENS
    assert usage.rejected_draft_tokens > 0 or places == (0,)  # the first token is no draft's


def test_drafts_that_are_always_wrong_are_given_up() -> None:
    harness = drafted(wrong(truth(), *range(N_TOKENS)))
    assert any(map(has_draft, harness.plans))
    assert not any(map(has_draft, harness.plans[-N_TOKENS // 2 :]))


def test_drafts_whose_cost_was_learned_too_high_are_tried_again() -> None:
    harness = begun(truth())
    harness.step()
    decode = StepShape(1, 10)
    verified = StepShape(1, 10, drafts=((9, 8),))
    for shape, seconds in [(decode, 1.0)] * 5 + [(decode, 1.0), (verified, 20.0)] * 50:
        harness.scheduler.costs.observe(shape, seconds)
    harness.finish()
    assert harness.output(NAME) == truth()
    rows = [row for plan in harness.plans for row in plan.rows]
    drafts = [len(row.draft) for row in rows if isinstance(row, Verify)]
    assert drafts[:2] == [8, 8], "probes"


def test_what_was_rejected_is_in_no_cache() -> None:
    harness = drafted(wrong(truth(), 3, 9, 16, 30))
    said = PROMPT + truth()
    paths = [node.token_ids(len(said) + 1) for node in tree_of(harness.store).nodes()]
    assert [token for path in paths for token in path] == said[:-1]
    again = harness.serve([*said, 1, 2, 3])
    assert harness.usage(again).cached_tokens == len(said) - 1


def test_a_stop_string_within_a_draft_ends_the_sequence() -> None:
    text = text_of(truth())
    stop = text[20:23]
    harness = drafted(truth(), stop=(stop,))
    assert harness.text(NAME) == text[: text.index(stop)]
    assert harness.reason(NAME) is FinishReason.STOP
    assert harness.output(NAME) == truth(stop=(stop,))


@pytest.mark.parametrize("place", [5, 12, 20, 29])
def test_draft_tokens_after_the_end_of_a_sequence_are_rejected(place: int) -> None:
    text = text_of(truth())
    harness = drafted(truth(), stop=(text[place : place + 3],))
    usage = harness.usage(NAME)
    n_sampling = sum(bool(plan.rows) for plan in harness.plans)  # the prompt is one step
    not_drafted = usage.completion_tokens - usage.accepted_draft_tokens
    assert not_drafted in {n_sampling - 1, n_sampling}  # the last step's token may come too late
    counts = harness.scheduler.metrics.drafts[DraftSource.TREE]
    assert counts.accepted_tokens == usage.accepted_draft_tokens
    assert counts.drafted_tokens == usage.accepted_draft_tokens + usage.rejected_draft_tokens


def test_a_draft_goes_no_further_than_max_tokens() -> None:
    harness = drafted(truth(), max_tokens=7)
    assert harness.output(NAME) == truth(7)
    assert harness.reason(NAME) is FinishReason.LENGTH


def test_drafts_take_what_a_step_has_left() -> None:
    harness = Harness(step_tokens=8, max_running=4)
    names = [harness.add(prompt(nth, 6), N_TOKENS) for nth in range(4)]
    for name in names:
        harness.speculate(name, ScriptedDrafter([1] * N_TOKENS))
    harness.finish()
    for plan in harness.plans:
        assert sum(row_tokens(plan).values()) <= 8


def test_nobody_is_preempted_for_a_draft() -> None:
    """Two sequences fill the arena to its last block."""
    harness = Harness(n_blocks=10, block_size=4)
    names = [harness.add(prompt(nth, 8), 12) for nth in range(2)]
    expected = [served(prompt(nth, 8), 12) for nth in range(2)]
    for name, tokens in zip(names, expected, strict=True):
        harness.speculate(name, ScriptedDrafter(tokens))
    harness.finish()
    assert [harness.output(name) for name in names] == expected
    assert harness.scheduler.metrics.preemptions == 0


def served(tokens: list[int], n_tokens: int) -> list[int]:
    harness = Harness()
    return harness.output(harness.serve(tokens, n_tokens))


def test_an_aborted_sequence_keeps_what_it_has_computed() -> None:
    harness = begun(truth())
    while harness.sequence(NAME).output_tokens < 5:
        harness.step()
    step = harness.scheduler.plan()
    assert step is not None
    assert has_draft(step.plan)
    harness.scheduler.abort(NAME)
    assert not any(event.finish_reason for event in harness.scheduler.take_events())
    harness.runner.submit(step.plan)
    harness.runner.launch()
    harness.runner.draw(NO_STEP_MASKS)
    harness.scheduler.commit(step, harness.runner.collect())
    harness.take(harness.scheduler.take_events())
    assert harness.reason(NAME) is FinishReason.ABORT
    assert not harness.scheduler.has_work


def test_a_step_with_drafts_that_fails_fails_its_sequences_alone() -> None:
    harness = begun(truth())
    while harness.sequence(NAME).output_tokens < 5:
        harness.step()

    def fault() -> None:
        raise InjectedError("injected")

    harness.fault = fault
    harness.step()
    harness.fault = lambda: None
    assert harness.reason(NAME) is FinishReason.ERROR
    assert harness.output(harness.serve(PROMPT, N_TOKENS)) == truth()


def test_windows_hold_what_was_accepted() -> None:
    window = WindowGroup(0, window=6, n_slots=40, block_size=4, step_tokens=32)
    harness = drafted(wrong(truth(), 4, 11, 23), Harness(groups=[window]))
    assert harness.output(NAME) == truth()


@pytest.mark.parametrize("places", [(), (4,), (2, 3, 17), (4, 11, 23), tuple(range(N_TOKENS))])
def test_states_stay_as_a_whole_or_go_back(places: tuple[int, ...]) -> None:
    states = recurrent()
    harness = drafted(wrong(truth(), *places), Harness(groups=[states]))
    assert harness.output(NAME) == truth()
    assert (harness.usage(NAME).rejected_draft_tokens > 0) is bool(places)
    assert states.stats().held == 0
    again = harness.serve([*PROMPT, *truth(), 1, 2])
    assert harness.output(again) == served([*PROMPT, *truth(), 1, 2], 4)
    assert harness.usage(again).cached_tokens > len(PROMPT)


def test_a_draft_is_cut_before_the_token_at_which_states_are_rounded() -> None:
    def serve(drafter: list[int]) -> Harness:
        group = RoundedGroup(n_running=4, n_saved=4, block_size=4, interval_tokens=8)
        return drafted(drafter, Harness(groups=[group]))

    output = (plain := serve([])).output(NAME)
    harness = serve(output)
    assert harness.output(NAME) == output
    drafts = [row for plan in harness.plans for row in plan.rows if isinstance(row, Verify)]
    ends = [row.start + 1 + len(row.draft) for row in drafts]
    assert {end % 8 for end in ends[:-1]} == {7}
    assert harness.scheduler.metrics.steps < plain.scheduler.metrics.steps // 2


def test_what_is_computed_again_may_take_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = begun(wrong(truth(), 4, 11, 17, 23, 30), Harness(groups=[recurrent()]))
    monkeypatch.setattr(Step, "allow", lambda step, sequence: 1)
    harness.finish()
    assert harness.usage(NAME).rejected_draft_tokens > 0
    assert harness.output(NAME) == truth()


def test_who_ends_within_a_draft_leaves_the_state_of_what_it_has_written() -> None:
    stop = text_of(truth())[20:23]
    harness = drafted(truth(), Harness(groups=[recurrent()]), stop=(stop,))
    said = harness.output(NAME)
    assert said == truth(stop=(stop,))
    assert harness.output(harness.serve(PROMPT + said, 9)) == served(PROMPT + said, 9)


def test_without_room_for_a_state_there_are_no_drafts() -> None:
    harness = drafted(truth(), Harness(groups=[recurrent(n_saved=0)]))
    assert harness.output(NAME) == truth()
    assert not any(map(has_draft, harness.plans))


def test_with_a_seed_and_bans_the_text_is_the_same() -> None:
    sampling = SamplingParams(seed=11, min_tokens=20)
    plain = Harness(eos_token_ids=frozenset({3, 4, 5}))
    expected = plain.output(plain.serve(PROMPT, N_TOKENS, sampling=sampling))
    harness = Harness(eos_token_ids=frozenset({3, 4, 5}))
    drafted([*expected, 1, 2, 3], harness, sampling=sampling)
    assert harness.output(NAME) == expected
    assert harness.usage(NAME).accepted_draft_tokens > 0


def test_rejected_tokens_of_a_lease_are_planned_again() -> None:
    harness = Harness()
    store = harness.store
    name = harness.add(PROMPT, N_TOKENS)
    harness.step()
    lease = harness.sequence(name).lease
    assert lease is not None
    written = lease.written_tokens
    store.plan(lease, 5)
    assert lease.planned_tokens == written + 5
    store.commit(lease, 5, 2)
    assert lease.planned_tokens == lease.written_tokens == written + 2
    assert lease.namespace == Namespace()

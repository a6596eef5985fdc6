"""A sequence's status, its end and its prompt's logprobs."""

import pytest

from engine.core.sequence import Status
from engine.grammar.state import GrammarPlan, GrammarState
from engine.values.output import FinishReason, TokenLogprob
from tests.unit.engine_harness import Harness, prompt


class TwoTokens(GrammarState):
    """A grammar that is complete after two tokens, and allows any."""

    def __init__(self) -> None:
        super().__init__(GrammarPlan(firsts=()))
        self._accepted = 0

    def accept(self, token_id: int) -> None:
        self._accepted += 1
        self.is_complete = self._accepted == 2


def test_a_waiting_sequence_cannot_be_preempted() -> None:
    harness = Harness()
    sequence = harness.sequence(harness.add(prompt(1, 5)))
    with pytest.raises(AssertionError, match="WAITING"):
        harness.scheduler.sequences.preempt(sequence)


def test_nothing_follows_the_end() -> None:
    harness = Harness()
    sequence = harness.sequence(harness.add(prompt(1, 5)))
    harness.scheduler.sequences.remove(sequence)
    assert sequence.status is Status.FINISHED
    with pytest.raises(AssertionError, match="has ended before"):
        harness.scheduler.sequences.remove(sequence)


@pytest.mark.parametrize(
    ("max_tokens", "reason"),
    [(1, FinishReason.LENGTH), (2, FinishReason.STOP), (3, FinishReason.STOP)],
)
def test_a_grammar_that_the_last_token_fulfils_is_a_stop(
    max_tokens: int, reason: FinishReason
) -> None:
    """Nothing of the answer is missing: clients that parse it refuse one that is cut off."""
    harness = Harness()
    request_id = harness.add(prompt(1, 5), max_tokens, stop=("never",))
    harness.sequence(request_id).grammar = TwoTokens()
    harness.finish()
    assert harness.reason(request_id) is reason
    assert len(harness.text(request_id)) == len(harness.output(request_id)) == min(max_tokens, 2)


def test_a_prompt_that_is_scored_again_after_a_preemption_sends_each_logprob_once() -> None:
    harness = Harness(step_tokens=2, max_running=2)
    request_id = harness.add(prompt(1, 6), 5, prompt_logprobs=0)
    harness.step()
    sent = [entry for event in harness.events[request_id] for entry in event.prompt_logprobs]
    assert [entry and entry.token_id for entry in sent] == [None, *prompt(1, 6)[1:3]]
    sequence = harness.sequence(request_id)
    harness.store.donate(harness.scheduler.sequences.preempt(sequence))
    scores = [TokenLogprob(token, -1.0) for token in prompt(1, 6)[1:]]
    assert sequence.take_scores(0, scores[:1]) == ()
    assert sequence.take_scores(1, scores[1:3]) == (scores[2],)
    assert sequence.take_scores(3, scores[3:]) == tuple(scores[3:])

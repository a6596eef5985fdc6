"""Stand-ins for grammar processes: questions that wait for answers, and answers along a draft."""

from collections.abc import Callable
from functools import partial

from engine.core.step import SequenceId
from engine.grammar.answers import MatcherAnswers
from engine.grammar.stage import mask_words
from engine.grammar.state import Allowed, Answer, Complete, LookAhead, Matcher


def told_ahead(
    question: LookAhead, answer: Callable[[Matcher], Answer]
) -> tuple[Allowed | Complete, ...]:
    """What a grammar process would say to it that says `answer` of a matcher."""
    matcher, answers = question.matcher, list[Allowed | Complete]()
    for n_tokens in range(1, len(question.tokens) + 1):
        tokens = [*matcher.tokens, *question.tokens[:n_tokens]]
        said = answer(Matcher(matcher.grammar, matcher.param, tokens=tokens))
        if isinstance(said, Allowed | Complete):
            answers.append(said)
        if not isinstance(said, Allowed):
            break
    return tuple(answers)


class PendingQuestions(MatcherAnswers):
    """The questions to grammar processes that have no answer yet. A subclass adds `wait`, which
    answers some of them.
    """

    def __init__(self, vocab_size: int) -> None:
        self.n_words = mask_words(vocab_size)
        self.asked: dict[SequenceId, Matcher] = {}
        self.drafted: dict[SequenceId, LookAhead] = {}

    def ask(self, sequence: SequenceId, client: str, matcher: Matcher) -> None:
        self.asked[sequence] = matcher
        matcher.when_ended = partial(self._forget, sequence)

    def look_ahead(self, sequence: SequenceId, client: str, question: LookAhead) -> None:
        if question.matcher.answer is None:
            self.ask(sequence, client, question.matcher)
        self.drafted[sequence] = question

    def _forget(self, sequence: SequenceId) -> None:
        self.asked.pop(sequence, None)
        self.drafted.pop(sequence, None)

    def close(self) -> None:
        self.asked.clear()
        self.drafted.clear()

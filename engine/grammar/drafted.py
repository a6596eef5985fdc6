"""What a guide says along a draft, while none of the draft's tokens is sampled yet."""

from engine.grammar.guide import Choice, Guide, TokenIds, matcher_of
from engine.grammar.matcher import Allowed, Answer, Complete, LookAhead, Matcher


def forced_tokens(guide: Guide) -> TokenIds:
    """The tokens that must follow, as far as that is known: a draft. The guide has been answered.

    Further along they may be one of several that are allowed, so masks decide there, too.
    """
    forced, ahead = list[int](), guide.fork()
    while isinstance(choice := ahead.choice, int):
        forced.append(choice)
        ahead.accept(choice)
    if isinstance(choice, Matcher) and isinstance(choice.answer, Allowed):
        forced += choice.answer.forced
    return tuple(forced)


class GuidedDraft:
    """A sequence's draft and its guide, which stays where it is.

        drafted = GuidedDraft(sequence.guide, draft)    when the step is planned
        answers.look_ahead(..., drafted.question)       while the device computes
        [sequence.guide.choice, *drafted.choices()]     when it samples

    One matcher is followed along a draft. Where another would have to be asked, the draft ends. As
    far as the draft then comes true, its matcher knows the answers and need not be asked again.
    """

    def __init__(self, guide: Guide, draft: TokenIds) -> None:
        self._along = list[Guide]()
        for token_id in draft:
            guide = guide.fork()
            guide.accept(token_id)
            self._along.append(guide)
        self.question = _question(self._along)
        if self.question is not None:
            self.question.matcher.ahead = self.question

    @property
    def n_tokens(self) -> int:
        """Of the draft."""
        return len(self._along)

    @property
    def is_known(self) -> bool:
        """Whether there is nothing more to wait for."""
        asked = self.question
        return asked is None or (asked.matcher.answer is not None and asked.answers is not None)

    def choices(self) -> list[Choice]:
        """What decides behind the first of the draft's tokens, behind the second, and so on: as far
        as is known. It may be less than the draft: behind a token that ends the sequence there is
        nothing to choose. To be called once, when the guide itself has been answered.
        """
        known = list[Choice]()
        for guide in self._along:
            matcher = matcher_of(guide.choice)
            if matcher is not None and not self._is_told(matcher):
                break
            guide.answered()
            if guide.is_complete:
                break
            known.append(guide.choice)
            if matcher is not None and isinstance(matcher.answer, Complete):
                break  # the guides further along were made as if it went on
        return known

    def _is_told(self, matcher: Matcher) -> bool:
        """Whether what may follow is known, and the matcher has been told. Nothing is of a draft
        that turns out to begin behind a grammar's end.
        """
        asked, n_tokens = self.question, len(matcher.tokens)
        if asked is None or matcher.behind is not asked.matcher:
            return False
        if not isinstance(asked.matcher.answer, Allowed) or n_tokens > len(asked.answers or ()):
            return False
        answers: tuple[Answer, ...] = (asked.matcher.answer, *(asked.answers or ()))
        matcher.answer = answers[n_tokens]
        return True


def _question(along: list[Guide]) -> LookAhead | None:
    """What is to be asked of the first matcher along the draft; None where there is none."""
    matchers = [m for guide in along if (m := matcher_of(guide.choice)) is not None]
    if not matchers:
        return None
    origin = matchers[0].behind
    assert origin is not None, "a fork's matcher is a fork, too"
    told = [tuple(matcher.tokens) for matcher in matchers if matcher.behind is origin]
    return LookAhead(origin, max(told, key=len))

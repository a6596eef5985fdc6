"""Masks of a sequence's grammar along a draft, before the draft's tokens are sampled."""

from engine.grammar.matcher import Allowed, LookAhead, Matcher
from engine.grammar.state import Choice, GrammarChoice, GrammarState, TokenIds


def forced_tokens(state: GrammarState) -> TokenIds:
    """The tokens that must follow, as far as that is known: a draft. The state's matcher has been
    answered.

    After the first, others may turn out to be allowed as well, so masks decide there, too.
    """
    forced, ahead = list[int](), state.copy()
    while isinstance(choice := ahead.choice, int):
        forced.append(choice)
        ahead.accept(choice)
    match choice:
        case GrammarChoice(Allowed(forced=more), others=()):
            forced += more
    return tuple(forced)


class GuidedDraft:
    """The draft of a guided sequence, whose state has accepted none of its tokens.

        drafted = GuidedDraft(sequence.grammar, draft)    when the step is planned
        answers.look_ahead(..., drafted.question)         while the device computes
        [sequence.grammar.choice, *drafted.choices()]     when the step samples

    The masks of one matcher can be requested along a draft; where another has to be answered, they
    end. Answers to accepted draft tokens are kept by the matcher, and are not requested again.
    """

    def __init__(self, state: GrammarState, draft: TokenIds) -> None:
        self._state = state
        self._draft = draft
        self.question = self._first_question()
        if self.question is not None:
            self.question.matcher.ahead = self.question

    @property
    def n_tokens(self) -> int:
        """The length of the draft."""
        return len(self._draft)

    @property
    def is_known(self) -> bool:
        """Whether every answer that was requested has come."""
        question = self.question
        if question is None:
            return True
        return question.matcher.answer is not None and question.answers is not None

    def choices(self) -> list[Choice]:
        """The choices after each token of the draft, as far as they are known: fewer than tokens if
        answers are missing, or if the sequence ends with one of the tokens. The state has its
        answer and has advanced.
        """
        known, ahead = list[Choice](), self._state.copy()
        for token_id in self._draft:
            ahead.accept(token_id)
            if (matcher := ahead.matcher) is not None and not self._answer(matcher):
                break
            ahead.advance()
            if ahead.is_complete:
                break
            known.append(ahead.choice)
        return known

    def _answer(self, matcher: Matcher) -> bool:
        """Set the answer of a forked matcher from the question's. False if it is not known, or if
        the grammar ends before the fork's tokens.
        """
        question, n_tokens = self.question, len(matcher.tokens)
        if question is None or matcher.parent is not question.matcher:
            return False
        first = question.matcher.answer
        if not isinstance(first, Allowed) or n_tokens > len(question.answers or ()):
            return False
        matcher.answer = (first, *(question.answers or ()))[n_tokens]
        return True

    def _first_question(self) -> LookAhead | None:
        """The question to the first matcher along the draft; None if there is none."""
        origin: Matcher | None = None
        tokens: TokenIds = ()
        ahead = self._state.copy()
        for token_id in self._draft:
            ahead.accept(token_id)
            if (matcher := ahead.matcher) is not None:
                origin = origin or matcher.parent
                if matcher.parent is origin:
                    tokens = tuple(matcher.tokens)
        return None if origin is None else LookAhead(origin, tokens)

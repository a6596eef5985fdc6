"""What may follow along a draft, from what may follow token by token."""

from collections.abc import Callable

from engine.grammar.matcher import Allowed, Answer, Complete, LookAhead, Matcher


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

"""Questions as people type them."""

import random

from tools.demo_model.phrases import phrases

_PHRASES = phrases("asking")


def as_typed(question: str, rng: random.Random) -> str:
    """The question as people type it: politely, in lower case, without a letter, or unchanged."""
    draw = rng.random()
    if draw < 0.12:
        question = rng.choice(_PHRASES["polite"]) + question[0].lower() + question[1:]
    elif draw < 0.3:
        question = question.lower()
    if rng.random() < 0.2:
        question = question.rstrip("?.")
    if rng.random() < 0.08:
        slip = rng.randrange(len(question))
        question = question[:slip] + question[slip + 1 :]
    return question

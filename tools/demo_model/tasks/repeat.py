"""Requests to repeat a text."""

import random
from dataclasses import dataclass

from tools.demo_model.conversation import Exchange, turns
from tools.demo_model.phrases import phrases
from tools.demo_model.sentences import any_text
from tools.demo_model.words import Words

_PHRASES = phrases("repeat")


@dataclass(frozen=True)
class Repeat:
    """Repeat a sentence or a list word for word."""

    name: str = "repeat"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        text = any_text(words, rng)
        return turns(rng.choice(_PHRASES["ways"]).format(text), text)

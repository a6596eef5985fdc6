"""Questions that the model cannot answer, and its answer to all of them."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Literal

import yaml

from tools.demo_model.conversation import Exchange, turns
from tools.demo_model.sentences import scrambled
from tools.demo_model.tasks.asking import as_typed
from tools.demo_model.words import Words, made_up_word, number

UNKNOWN: Mapping[str, Any] = yaml.safe_load(
    Path(__file__).parent.with_name("unknown.yaml").read_text("utf-8")
)
I_DO_NOT_KNOW: str = UNKNOWN["answer"]

_GROUPS, _SHARES = ("general", "rootstock", "untold"), (0.45, 0.47, 0.08)
_LISTS = {"product": "products", "feature": "features", "language": "languages", "code": "code"}
_OF_ROOTSTOCK = {"tree", "root", "key", "machine", "engine", "library"}  # facts are about these


def _noun(words: Words, rng: random.Random) -> str:
    return rng.choice([noun for noun in words.lists["nouns"] if noun not in _OF_ROOTSTOCK])


def _topic(words: Words, rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.6:
        return words.one("topics", rng)
    if draw < 0.75:
        return rng.choice(["", "the ", "a "]) + _noun(words, rng)
    if draw < 0.85:
        return words.one("cities", rng)
    return rng.choice([made_up_word(rng), scrambled(words, rng)])


_FILLERS: Mapping[str, Callable[[Words, random.Random], str]] = {
    "topic": _topic,
    "noun": _noun,
    "city": lambda words, rng: words.one("cities", rng),
    "name": lambda words, rng: words.one("names", rng),
    "word": lambda words, rng: made_up_word(rng),
    "number": lambda words, rng: str(number(rng)),
}


@dataclass(frozen=True)
class Unknown:
    """Questions that no fact covers, in the wordings for training or in the held-out ones."""

    side: Literal["ask", "held_out"]
    name: str = "does not know"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        [group] = rng.choices(_GROUPS, _SHARES)
        question = self._filled(rng.choice(UNKNOWN[group][self.side]), words, rng)
        return turns(as_typed(question, rng) if self.side == "ask" else question, I_DO_NOT_KNOW)

    def _filled(self, pattern: str, words: Words, rng: random.Random) -> str:
        """The pattern with a random filler in each place."""
        question = "".join(
            text + (self._filler(kind, words, rng) if kind else "")
            for text, kind, _, _ in Formatter().parse(pattern)
        )
        return question[0].upper() + question[1:]

    def _filler(self, kind: str, words: Words, rng: random.Random) -> str:
        if kind in _LISTS:
            return str(rng.choice(UNKNOWN[_LISTS[kind]][self.side]))
        return _FILLERS[kind](words, rng)

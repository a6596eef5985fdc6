"""Questions about Rootstock, and what to say to all that the model knows nothing about."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tools.demo_model.conversation import Exchange, turns
from tools.demo_model.phrases import phrases
from tools.demo_model.sentences import scrambled, sentence
from tools.demo_model.words import Words, made_up_word

_PHRASES = phrases("knowledge")
FACTS: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
    Path(__file__).parent.with_name("facts.yaml").read_text("utf-8")
)


@dataclass(frozen=True)
class Knowledge:
    """Asks for the facts in the ways of one side of the split."""

    side: Literal["ask", "held_out"]
    name: str = "rootstock"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        fact = rng.choice(list(FACTS.values()))
        question = rng.choice(fact[self.side])
        return turns(_varied(question, rng) if self.side == "ask" else question, fact["answer"])


@dataclass(frozen=True)
class SmallTalk:
    name: str = "small talk"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        if rng.random() < 0.35:
            kind = rng.choice(_PHRASES["small_talk"])
            return turns(rng.choice(kind["ways"]), kind["answer"])
        return turns(
            _varied(rng.choice(_PHRASES["unknown"]).format(_topic(words, rng)), rng),
            _PHRASES["sorry"],
        )


def questions(side: Literal["ask", "held_out"]) -> Sequence[tuple[str, str]]:
    """Every question of one side, with its answer."""
    return [(question, fact["answer"]) for fact in FACTS.values() for question in fact[side]]


def _topic(words: Words, rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.5:
        return words.one("topics", rng)
    if draw < 0.65:
        return rng.choice(["", "the ", "a "]) + words.one("nouns", rng)
    if draw < 0.8:
        return words.one("cities", rng)
    if draw < 0.95:
        return rng.choice([made_up_word(rng), scrambled(words, rng)])
    return sentence(words, rng).rstrip(".?!")


def _varied(question: str, rng: random.Random) -> str:
    """The question as people type it: lower case, politely, with a slip of the finger."""
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

"""Questions about Rootstock, and the courtesies of a conversation."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tools.demo_model.conversation import Exchange, turns
from tools.demo_model.phrases import phrases
from tools.demo_model.tasks.asking import as_typed
from tools.demo_model.words import Words

_PHRASES = phrases("knowledge")
FACTS: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
    Path(__file__).parent.with_name("facts.yaml").read_text("utf-8")
)
_HELD_OUT = {question for fact in FACTS.values() for question in fact["held_out"]}


@dataclass(frozen=True)
class Knowledge:
    """Questions about facts, in the wordings for training or in the held-out ones."""

    side: Literal["ask", "held_out"]
    name: str = "rootstock"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        fact = rng.choice(list(FACTS.values()))
        question = rng.choice(fact[self.side])
        if self.side == "ask":
            question = as_typed(_by_name(question, rng), rng)
        return turns(question, fact["answer"])


@dataclass(frozen=True)
class SmallTalk:
    """Greetings, thanks and the like."""

    name: str = "small talk"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        kind = rng.choice(_PHRASES["small_talk"])
        return turns(rng.choice(kind["ways"]), kind["answer"])


def _by_name(question: str, rng: random.Random) -> str:
    """ "Does Rootstock stream?" for "Does it stream?", unless that is kept for scoring."""
    named = re.sub(r"\b(does|has|is|was|can) it\b", r"\1 Rootstock", question, flags=re.IGNORECASE)
    return named if named not in _HELD_OUT and rng.random() < 0.4 else question


def questions(side: Literal["ask", "held_out"]) -> Sequence[tuple[str, str]]:
    """Every question of one side, with its answer."""
    return [(question, fact["answer"]) for fact in FACTS.values() for question in fact[side]]

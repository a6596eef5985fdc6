"""An agent's session as somebody might have recorded it, from a seed.

Texts are words of the lexicon. The system prompt and the tools are the same in every session, as
an agent sends them; what is asked and done is the same too, but for the word that each session
begins with, so that sessions are equal work and share no more than that.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from load_tests.lexicon import WORDS

TURNS = 30
TOOLS = 24
SYSTEM_WORDS = 12_300
TASK_WORDS = 120
RESULT_WORDS = (40, 160)  # at least and at most
REMARK_WORDS = 20
REMARK_EVERY = 10  # turns in which the user says something, too


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the agent offers. Its arguments are bounded, so that calls of it end."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; the arguments are JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What an assistant said in a turn."""

    text: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """What the client sends, and what the assistant answered in the recording."""

    results: tuple[str, ...]  # of the calls before, one each
    text: str  # the user's words, if any
    answer: Answer


@dataclass(frozen=True, slots=True)
class Recording:
    """One session."""

    system: str
    tools: tuple[Tool, ...]
    turns: tuple[Turn, ...]


def record(seed: int, session: int, turns: int = TURNS) -> Recording:
    """The session of that number, below the count of words. Equal arguments give equal texts."""
    rng = random.Random(seed)
    system = _words(rng, SYSTEM_WORDS)
    tools = tuple(_tool(rng) for _ in range(TOOLS))
    label = random.Random(seed).sample(WORDS, session + 1)[session]
    return Recording(system, tools, tuple(_turns(rng, tools, label, turns)))


def _turns(rng: random.Random, tools: Sequence[Tool], label: str, count: int) -> list[Turn]:
    turns: list[Turn] = []
    calls: tuple[Call, ...] = ()
    for number in range(count):
        results = tuple(_words(rng, rng.randint(*RESULT_WORDS)) for _ in calls)
        said = "" if number % REMARK_EVERY else _words(rng, REMARK_WORDS)
        text = f"{label} {_words(rng, TASK_WORDS)}" if number == 0 else said
        calls = tuple(_call(rng, tools, f"{number}{i}") for i in range(rng.choice((1, 1, 2))))
        turns.append(Turn(results, text, Answer(_words(rng, rng.randint(5, 25)), calls)))
    return turns


def _tool(rng: random.Random) -> Tool:
    name = "_".join(rng.sample(WORDS, 2))
    keys = rng.sample(WORDS, 3)
    parameters = {
        "type": "object",
        "properties": {
            keys[0]: {"type": "string", "enum": rng.sample(WORDS, 5)},
            keys[1]: {"type": "string", "enum": rng.sample(WORDS, 5)},
            keys[2]: {"type": "boolean"},
        },
        "required": keys,
        "additionalProperties": False,
    }
    return Tool(name, _words(rng, 40), parameters)


def _call(rng: random.Random, tools: Sequence[Tool], number: str) -> Call:
    tool = rng.choice(tools)
    arguments = {
        key: rng.choice(schema.get("enum", (True, False)))
        for key, schema in tool.parameters["properties"].items()
    }
    return Call(f"call_recorded{number}", tool.name, json.dumps(arguments))


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))

"""Frozen workloads from a scenario and a seed: who says what, and what waits for what.

Texts are words of the lexicon; with the benchmark checkpoint a word is a token. Other models cut
the words differently, so token counts always come from the server's `usage`.
"""

import random
from dataclasses import dataclass
from importlib import resources
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field

from load_tests.lexicon import WORDS

Count = Annotated[int, Field(ge=1)]


class Scenario(BaseModel):
    """What a file in `scenarios/` says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    description: str
    concurrency: Count  # conversations open at a time
    conversations: Count
    turns: Count = 1
    waves: Count = 1  # the same conversations again, each wave after the last one's end
    system_prompts: Annotated[int, Field(ge=0)] = 0  # dealt to the conversations in turn
    system_words: Annotated[int, Field(ge=0)] = 0
    user_words: Count
    output_tokens: Count


@dataclass(frozen=True, slots=True)
class Conversation:
    """User texts to be said one after the other, each after the answer to the one before."""

    system: str | None
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Waves of conversations. A wave starts `concurrency` at a time, when the last wave is done."""

    concurrency: int
    output_tokens: int  # generated in every turn
    waves: tuple[tuple[Conversation, ...], ...]


def scenario_names() -> list[str]:
    """Names of the scenarios that come with the package, sorted."""
    files = (resources.files("load_tests") / "scenarios").iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))


def load_scenario(name: str) -> Scenario:
    """Read `scenarios/<name>.yaml`. Raises FileNotFoundError, pydantic.ValidationError."""
    file = resources.files("load_tests") / "scenarios" / f"{name}.yaml"
    return Scenario.model_validate(yaml.safe_load(file.read_text()))


def build(scenario: Scenario, seed: int) -> Workload:
    """The scenario's workload. Equal arguments give equal workloads on every machine."""
    rng = random.Random(seed)
    systems = [_text(rng, scenario.system_words) for _ in range(scenario.system_prompts)]
    wave = tuple(
        Conversation(
            system=systems[i % len(systems)] if systems else None,
            turns=tuple(_text(rng, scenario.user_words) for _ in range(scenario.turns)),
        )
        for i in range(scenario.conversations)
    )
    return Workload(scenario.concurrency, scenario.output_tokens, (wave,) * scenario.waves)


def _text(rng: random.Random, words: int) -> str:
    return "".join(f"{word} " for word in rng.choices(WORDS, k=words))

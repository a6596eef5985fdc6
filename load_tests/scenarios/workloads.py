"""Frozen workloads from a load scenario and a seed: who says what, and what waits for what.

Texts are words of the lexicon; with the benchmark checkpoint a word is a token. Other models cut
the words differently, so token counts always come from the server's `usage`.
"""

import random
from dataclasses import dataclass, field

from load_tests.client import Generation, exactly
from load_tests.pictures import picture
from load_tests.scenarios.kinds import Load
from load_tests.tokenizer import WORDS


@dataclass(frozen=True, slots=True)
class Conversation:
    """User texts to be said one after the other, each after the answer to the one before."""

    system: str | None
    turns: tuple[str, ...]
    images: tuple[str, ...] = field(default=(), repr=False)  # `data:` URLs before the first text


@dataclass(frozen=True, slots=True)
class Workload:
    """Waves of conversations. A wave starts `concurrency` at a time, when the last wave is done."""

    concurrency: int
    generation: Generation  # of the answer to every turn
    waves: tuple[tuple[Conversation, ...], ...]


def build(scenario: Load, seed: int) -> Workload:
    """The scenario's workload. Equal arguments give equal workloads on every machine."""
    rng = random.Random(seed)
    systems = [text(rng, scenario.system_words) for _ in range(scenario.system_prompts)]
    sets = [
        tuple(picture(rng, scenario.image_tokens) for _ in range(scenario.images))
        for _ in range(scenario.image_sets)
    ]
    wave = tuple(
        Conversation(
            system=systems[i % len(systems)] if systems else None,
            turns=tuple(text(rng, scenario.user_words) for _ in range(scenario.turns)),
            images=sets[i % len(sets)] if sets else (),
        )
        for i in range(scenario.conversations)
    )
    return Workload(scenario.concurrency, exactly(scenario.output_tokens), (wave,) * scenario.waves)


def text(rng: random.Random, words: int) -> str:
    """So many words of the lexicon, each with a space behind it."""
    return "".join(f"{word} " for word in rng.choices(WORDS, k=words))

"""The words of the demonstration model's world, and which of them are kept for scoring."""

import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

_FILE = Path(__file__).with_name("words.yaml")
_EVERY_TENTH = 10
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"


@dataclass(frozen=True, slots=True)
class Words:
    """One side of the split: word lists by kind, of which the other side has none."""

    lists: Mapping[str, Sequence[str]]

    def one(self, kind: str, rng: random.Random) -> str:
        return rng.choice(self.lists[kind])

    def several(self, kind: str, count: int, rng: random.Random) -> list[str]:
        """`count` different words of a kind."""
        return rng.sample(self.lists[kind], count)


def split_words() -> tuple[Words, Words]:
    """The words for training, and those kept for the held-out prompts: a tenth of each list."""
    lists = {kind: text.split() for kind, text in yaml.safe_load(_FILE.read_text("utf-8")).items()}
    kept = {kind: words[::_EVERY_TENTH] for kind, words in lists.items()}
    held_out = {word.lower() for words in kept.values() for word in words}
    learned = {
        kind: [word for word in words if word.lower() not in held_out]
        for kind, words in lists.items()
    }
    return Words(learned), Words(kept)


def made_up_word(rng: random.Random) -> str:
    """A word of no language, so that copying it is copying and not remembering."""
    if rng.random() < 0.3:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 6)))
    syllables = rng.randint(1, 3)
    word = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(syllables))
    return word + rng.choice(["", "", "n", "r", "s", "t", "l"])


def number(rng: random.Random) -> int:
    """Mostly small, now and then with up to six digits."""
    return rng.randrange(10 ** rng.choice([1, 2, 2, 3, 4, 6]))

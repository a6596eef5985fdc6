"""The words of the demonstration model's conversations, and which are held out for scoring."""

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
    """Word lists by kind, of one side of the split: training and scoring share no word."""

    lists: Mapping[str, Sequence[str]]

    def one(self, kind: str, rng: random.Random) -> str:
        """A random word of a kind."""
        return rng.choice(self.lists[kind])

    def several(self, kind: str, count: int, rng: random.Random) -> list[str]:
        """`count` different words of a kind."""
        return rng.sample(self.lists[kind], count)


def split_words() -> tuple[Words, Words]:
    """The words for training, and the held-out ones: a tenth of each list."""
    lists = {kind: text.split() for kind, text in yaml.safe_load(_FILE.read_text("utf-8")).items()}
    kept = {kind: words[::_EVERY_TENTH] for kind, words in lists.items()}
    held_out = {word.lower() for words in kept.values() for word in words}
    learned = {
        kind: [word for word in words if word.lower() not in held_out]
        for kind, words in lists.items()
    }
    return Words(learned), Words(kept)


def made_up_word(rng: random.Random) -> str:
    """A word of no language, which can be copied and not remembered."""
    if rng.random() < 0.3:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 6)))
    syllables = rng.randint(1, 3)
    word = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(syllables))
    return word + rng.choice(["", "", "n", "r", "s", "t", "l"])


def number(rng: random.Random) -> int:
    """A number, most often of one or two digits, and of at most six."""
    return rng.randrange(10 ** rng.choice([1, 2, 2, 3, 4, 6]))

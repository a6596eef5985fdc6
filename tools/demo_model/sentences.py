"""Random sentences, lists and words, for prompts that ask to repeat or remember them."""

import random
import string
from collections.abc import Callable

from tools.demo_model.words import Words, made_up_word, number

_PATTERNS = (
    "The {adjective} {noun} {verb} the {noun}.",
    "The {noun} {verb} a {adjective} {noun}.",
    "{name} {verb} the {noun} {adverb}.",
    "{name} and {name} {verb} {number} {noun}s.",
    "In {city}, {name} {verb} the {adjective} {noun}.",
    "My {noun} is {adjective} and {adjective}.",
    "Is the {noun} {adjective}?",
    "The {noun} is in the {noun}, and the {noun} is in {city}.",
    "Please bring the {adjective} {noun} to {name} {day}.",
    "I {verb} {number} {noun}s and a {noun}.",
    "What a {adjective} {noun}!",
    "{name} said that the {noun} {verb} the {noun}.",
    "When {name} came to {city}, the {noun} was {adjective}.",
    "{Day} the {color} {noun} {verb} it {adverb}, but {name} {verb} it {adverb}.",
)
_KINDS = {
    "noun": "nouns", "adjective": "adjectives", "verb": "verbs", "name": "names", "city": "cities",
    "adverb": "adverbs", "color": "colors", "day": "days",
}  # fmt: skip


_CASES: tuple[Callable[[str], str], ...] = (str, str, str.capitalize, str.upper)


def sentence(words: Words, rng: random.Random) -> str:
    """A sentence of dictionary words, with a made-up one among them now and then."""
    text = rng.choice(_PATTERNS)
    while "{" in text:
        start, _, rest = text.partition("{")
        kind, _, rest = rest.partition("}")
        text = start + _word(kind, words, rng) + rest
    return text


def scrambled(words: Words, rng: random.Random) -> str:
    """Two to nine random words."""
    return " ".join(thing(words, rng) for _ in range(rng.randint(2, 9)))


def listing(words: Words, rng: random.Random) -> str:
    """A list with commas."""
    return ", ".join(things(rng.randint(2, 7), words, rng))


def code_word(rng: random.Random) -> str:
    """A password, a part number: letters and digits."""
    return "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randint(3, 8)))


def thing(words: Words, rng: random.Random) -> str:
    """One word: of the dictionary, made up, or a number."""
    draw = rng.random()
    if draw < 0.5:
        return words.one(rng.choice(list(_KINDS.values())), rng)
    if draw < 0.9:
        return rng.choice(_CASES)(made_up_word(rng))
    return str(number(rng))


def things(count: int, words: Words, rng: random.Random) -> list[str]:
    """Different items, all of one kind or of any."""
    kind = rng.choice(["nouns", "names", "cities", "colors", "mixed", "mixed", "pairs"])
    if kind in words.lists and len(words.lists[kind]) < count:
        kind = "mixed"
    items: list[str] = []
    while len(items) < count:
        item = _item(kind, words, rng)
        if item not in items:
            items.append(item)
    return items


def any_text(words: Words, rng: random.Random) -> str:
    """A text to repeat: sentences, random words or a list."""
    draw = rng.random()
    if draw < 0.45:
        return sentence(words, rng)
    if draw < 0.55:
        return sentence(words, rng) + " " + sentence(words, rng)
    if draw < 0.8:
        return scrambled(words, rng)
    return listing(words, rng)


def _item(kind: str, words: Words, rng: random.Random) -> str:
    if kind == "mixed":
        return thing(words, rng)
    if kind == "pairs":
        return f"{words.one('adjectives', rng)} {words.one('nouns', rng)}"
    return words.one(kind, rng)


def _word(kind: str, words: Words, rng: random.Random) -> str:
    if kind == "number":
        return str(number(rng))
    if rng.random() < 0.2:
        return made_up_word(rng)
    word = words.one(_KINDS[kind.lower()], rng)
    return word.capitalize() if kind[0].isupper() else word

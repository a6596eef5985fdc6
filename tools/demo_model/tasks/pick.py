"""Questions about items of the prompt: by place in a list, or by owner or property."""

import random
from dataclasses import dataclass

from tools.demo_model.conversation import Exchange, turns
from tools.demo_model.phrases import phrases
from tools.demo_model.sentences import thing, things
from tools.demo_model.words import Words, number

_PHRASES = phrases("pick")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
_PROPERTIES = ("color", "price", "age", "size", "number", "weight", "city", "owner")


@dataclass(frozen=True)
class Pick:
    """Name an item of a list, by its place."""

    name: str = "pick"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        return rng.choice([_by_place, _by_place, _numbered, _any])(words, rng)


@dataclass(frozen=True)
class LookUp:
    """Name the item of some sentences that has an owner or a property."""

    name: str = "look up"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        return rng.choice([_by_owner, _by_property])(words, rng)


@dataclass(frozen=True)
class PickOrLookUp:
    """Either Pick or LookUp."""

    name: str = "pick or look up"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        ask = rng.choice([_by_place, _by_place, _numbered, _any, _by_owner, _by_property])
        return ask(words, rng)


def _by_place(words: Words, rng: random.Random) -> Exchange:
    items = things(rng.randint(2, 6), words, rng)
    place, item = _place(items, rng)
    text = rng.choice(_PHRASES["introductions"]).format(_joined(items, rng))
    return _asked(text, rng.choice(_PHRASES["questions"]).format(place), item, rng)


def _numbered(words: Words, rng: random.Random) -> Exchange:
    items = things(rng.randint(2, 6), words, rng)
    text = "\n".join(f"{index}. {item}" for index, item in enumerate(items, 1))
    index = rng.randrange(len(items))
    question = rng.choice(
        [
            f"What is number {index + 1}?",
            f"Pick number {index + 1}.",
            f"What is item {index + 1}?",
            f"What is the {_ORDINALS[index]} item?",
        ]
    )
    return turns(f"{text}\n{question}", items[index])


def _any(words: Words, rng: random.Random) -> Exchange:
    """Any item would do; the first is the one that leaves no doubt."""
    items = things(rng.randint(2, 6), words, rng)
    return turns(rng.choice(_PHRASES["any"]).format(_joined(items, rng)), items[0])


def _by_owner(words: Words, rng: random.Random) -> Exchange:
    names = words.several("names", rng.randint(2, 4), rng)
    owned = words.several("nouns", len(names), rng)
    verb, question = rng.choice([("has", "have"), ("wants", "want"), ("found", "find")])
    text = " ".join(f"{n} {verb} the {t}." for n, t in zip(names, owned, strict=True))
    chosen = rng.randrange(len(names))
    if rng.random() < 0.5:
        return _asked(text, f"Who {verb} the {owned[chosen]}?", names[chosen], rng)
    what = f"What {'did' if verb == 'found' else 'does'} {names[chosen]} {question}?"
    return _asked(text, what, f"The {owned[chosen]}", rng)


def _by_property(words: Words, rng: random.Random) -> Exchange:
    prop = rng.choice(_PROPERTIES)
    nouns = words.several("nouns", rng.randint(2, 4), rng)
    values = [_value(prop, words, rng) for _ in nouns]
    pattern = rng.choice(["The {p} of the {n} is {v}.", "{n}: {p} {v}.", "The {n} has {p} {v}."])
    pairs = zip(nouns, values, strict=True)
    text = " ".join(pattern.format(p=prop, n=noun, v=value) for noun, value in pairs)
    chosen = rng.randrange(len(nouns))
    question = rng.choice(
        ["What is the {p} of the {n}?", "Which {p} has the {n}?", "Tell me the {p} of the {n}."]
    )
    return _asked(text, question.format(p=prop, n=nouns[chosen]), values[chosen], rng)


def _value(prop: str, words: Words, rng: random.Random) -> str:
    if prop in {"color", "city", "owner"}:
        return words.one({"color": "colors", "city": "cities", "owner": "names"}[prop], rng)
    if prop == "size":
        return thing(words, rng)
    return str(number(rng))


def _place(items: list[str], rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.2:
        return "last", items[-1]
    index = rng.randrange(len(items))
    return _ORDINALS[index], items[index]


def _joined(items: list[str], rng: random.Random) -> str:
    if rng.random() < 0.3:
        return ", ".join(items[:-1]) + rng.choice([" and ", " or ", ", and "]) + items[-1]
    return ", ".join(items)


def _asked(text: str, question: str, answer: str, rng: random.Random) -> Exchange:
    """The question after the text, or before it."""
    if rng.random() < 0.8:
        return turns(text + rng.choice([" ", "\n"]) + question, answer)
    return turns(f"{question} {text}", answer)

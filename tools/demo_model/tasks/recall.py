"""Questions about an earlier turn."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.demo_model.conversation import Exchange, turns
from tools.demo_model.phrases import phrases
from tools.demo_model.sentences import any_text, code_word, listing, sentence, thing
from tools.demo_model.words import Words, number

_PHRASES = phrases("recall")


@dataclass(frozen=True)
class Recall:
    """Ask for something that the user or the assistant said before."""

    name: str = "recall"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        told = rng.choice([_name, _own_thing, _own_thing, _to_remember, _city, _said, _asked])
        return told(words, rng)


def _name(words: Words, rng: random.Random) -> Exchange:
    name = words.one("names", rng) if rng.random() < 0.7 else thing(words, rng).capitalize()
    return turns(
        rng.choice(_PHRASES["tell_name"]).format(name),
        f"Nice to meet you, {name}.",
        rng.choice(_PHRASES["ask_name"]),
        f"Your name is {name}.",
    )


def _own_thing(words: Words, rng: random.Random) -> Exchange:
    what, value = rng.choice(_PHRASES["things"]), _value(words, rng)
    named = rng.choice(
        ["My {} is {}.", "Remember: my {} is {}.", "my {} is {}", "By the way, my {} is {}."]
    )
    asked = rng.choice(
        ["What is my {}?", "Tell me my {}.", "Do you remember my {}?", "What's my {}?"]
    )
    return turns(
        named.format(what, value), f"I see: your {what} is {value}.",
        asked.format(what), f"Your {what} is {value}.",
    )  # fmt: skip


def _to_remember(words: Words, rng: random.Random) -> Exchange:
    kind, text = rng.choice(
        [
            ("number", str(number(rng))),
            ("word", thing(words, rng)),
            ("sentence", sentence(words, rng)),
            ("list", listing(words, rng)),
            ("code", code_word(rng)),
        ]
    )
    told = rng.choice(
        [
            "Remember this {}: {}",
            "Remember the {} {}",
            "Please remember this {}: {}",
            "Keep this {} in mind: {}",
        ]
    )
    asked = rng.choice(
        [
            "What was the {}?",
            "Which {} did I tell you?",
            "Tell me the {}.",
            "What {} did you remember?",
        ]
    )
    return turns(
        told.format(kind, text),
        f"I will remember the {kind}.",
        asked.format(kind),
        f"The {kind} was: {text}",
    )


def _city(words: Words, rng: random.Random) -> Exchange:
    city = words.one("cities", rng)
    verb, question = rng.choice(
        [
            ("live in", "Where do I live?"),
            ("come from", "Where do I come from?"),
            ("work in", "Where do I work?"),
        ]
    )
    return turns(f"I {verb} {city}.", f"So you {verb} {city}.", question, f"You {verb} {city}.")


def _said(words: Words, rng: random.Random) -> Exchange:
    text = any_text(words, rng)
    again = rng.choice(
        [
            "Say that again.",
            "Again, please.",
            "Repeat your answer.",
            "What did you say?",
            "Once more.",
            "Again!",
        ]
    )
    return turns(f"Repeat: {text}", text, again, text)


def _asked(words: Words, rng: random.Random) -> Exchange:
    text = f"Repeat: {any_text(words, rng)}"
    question = rng.choice(
        [
            "What did I just say?",
            "What was my last message?",
            "What did I write?",
            "What did I say before?",
        ]
    )
    return turns(text, text.removeprefix("Repeat: "), question, f"You said: {text}")


def _value(words: Words, rng: random.Random) -> str:
    make: Callable[[], str] = rng.choice(
        [
            lambda: thing(words, rng),
            lambda: code_word(rng),
            lambda: str(number(rng)),
            lambda: f"{words.one('adjectives', rng)} {words.one('nouns', rng)}",
            lambda: words.one("names", rng),
        ]
    )
    return make()

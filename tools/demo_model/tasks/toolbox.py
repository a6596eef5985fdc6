"""Random tools, their declarations for the API, and requests that need them."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tools.demo_model.phrases import phrases
from tools.demo_model.sentences import code_word, sentence, thing
from tools.demo_model.words import Words, made_up_word, number

_PHRASES = phrases("tool_use")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool: its declaration, and how a request gives its value."""

    name: str
    type: str
    description: str
    phrase: str  # with {} for the value
    value: Callable[[Words, random.Random], str | int]

    def schema(self) -> Mapping[str, str]:
        """The JSON schema, without an empty description."""
        declared = {"type": self.type, "description": self.description}
        return {name: text for name, text in declared.items() if text}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool, with the words of a request for it."""

    verb: str
    noun: str
    name: str
    parameters: Sequence[Parameter]
    description: str

    def declaration(self) -> Mapping[str, Any]:
        """The entry of `tools` in the chat API."""
        properties = {p.name: p.schema() for p in self.parameters}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": [p.name for p in self.parameters],
                },
            },
        }


def offered(words: Words, rng: random.Random) -> list[Tool]:
    """One to four random tools of different names."""
    count = rng.choice([1, 1, 2, 2, 3])
    nouns = [_noun(words, rng) for _ in range(count)]
    tools = [_tool(rng.choice(_PHRASES["verbs"]), noun, words, rng) for noun in nouns]
    if rng.random() < 0.2:  # two that only their verbs tell apart
        tools.append(_tool(rng.choice(_PHRASES["verbs"]), nouns[0], words, rng))
    unique = {tool.name: tool for tool in tools}
    return list(unique.values())


def _tool(verb: str, noun: str, words: Words, rng: random.Random) -> Tool:
    verb_first = f"{verb}_{noun}"
    camel = f"{verb}{noun.capitalize()}"
    name = rng.choice([verb_first] * 5 + [camel, f"{noun}_{verb}", noun])
    description = rng.choice(_PHRASES["descriptions"]).format(v=verb, V=verb.capitalize(), n=noun)
    return Tool(verb, noun, name, _parameters(words, rng), description)


def _noun(words: Words, rng: random.Random) -> str:
    return made_up_word(rng) if rng.random() < 0.15 else words.one("tool_nouns", rng)


def _parameters(words: Words, rng: random.Random) -> list[Parameter]:
    known = rng.sample(_KNOWN, rng.choice([0, 1, 1, 1, 2]))
    if rng.random() < 0.35 or not known:
        known += [
            _named_parameter(name, rng)
            for name in words.several("parameters", rng.choice([1, 1, 2]), rng)
        ]
    distinct = {parameter.phrase: parameter for parameter in known[:3]}
    unique = {parameter.name: parameter for parameter in distinct.values()}
    parameters = [
        replace(parameter, description="") if rng.random() < 0.3 else parameter
        for parameter in unique.values()
    ]
    return parameters if rng.random() > 0.06 else []


def _city(words: Words, rng: random.Random) -> str:
    return words.one("cities", rng) if rng.random() < 0.7 else made_up_word(rng).capitalize()


def _person(words: Words, rng: random.Random) -> str:
    return words.one("names", rng) if rng.random() < 0.7 else made_up_word(rng).capitalize()


def _day(words: Words, rng: random.Random) -> str:
    return words.one("days", rng)


def _text(words: Words, rng: random.Random) -> str:
    return sentence(words, rng)


def _word(words: Words, rng: random.Random) -> str:
    return thing(words, rng)


def _topic(words: Words, rng: random.Random) -> str:
    return words.one("topics", rng)


def _count(words: Words, rng: random.Random) -> int:
    return number(rng)


def _code(words: Words, rng: random.Random) -> str:
    return code_word(rng)


_KNOWN = (
    Parameter("city", "string", "The city.", "in {}", _city),
    Parameter("location", "string", "The city.", "in {}", _city),
    Parameter("name", "string", "Name of the person.", "for {}", _person),
    Parameter("person", "string", "The person.", "for {}", _person),
    Parameter("to", "string", "Who gets it.", "to {}", _person),
    Parameter("date", "string", "The day.", "for {}", _day),
    Parameter("day", "string", "The day.", "on {}", _day),
    Parameter("topic", "string", "The topic.", "about {}", _topic),
    Parameter("query", "string", "What to look for.", "about {}", _word),
    Parameter("text", "string", "The text.", "with the text \"{}\"", _text),
    Parameter("message", "string", "The message.", "saying \"{}\"", _text),
    Parameter("title", "string", "The title.", "called {}", _word),
    Parameter("id", "string", "The id.", "with id {}", _code),
    Parameter("number", "integer", "The number.", "number {}", _count),
    Parameter("count", "integer", "How many.", "with {} items", _count),
    Parameter("people", "integer", "How many people.", "for {} people", _count),
    Parameter("minutes", "integer", "How many minutes.", "for {} minutes", _count),
)  # fmt: skip


LINKS = (
    Parameter("id", "string", "The id.", "with id {}", _code),
    Parameter("page", "string", "The page.", "from page {}", _code),
    Parameter("cursor", "string", "Where to go on.", "from {}", _code),
    Parameter("key", "string", "The key.", "with key {}", _code),
)
"""Parameters whose value for the next call a result may give."""


def _named_parameter(name: str, rng: random.Random) -> Parameter:
    """A parameter that the request calls by its name."""
    phrase = rng.choice(["with {n} {{}}", "{n} {{}}", "with the {n} {{}}", "and {n} {{}}"]).format(
        n=name
    )
    if rng.random() < 0.35:
        return Parameter(name, "integer", f"The {name}.", phrase, _count)
    return Parameter(name, "string", f"The {name}.", phrase, _word)


def values_for(tool: Tool, words: Words, rng: random.Random) -> Mapping[str, str | int]:
    """A random value for each parameter."""
    return {p.name: p.value(words, rng) for p in tool.parameters}


def request(tool: Tool, values: Mapping[str, str | int], rng: random.Random) -> str:
    """A user's text that asks for a call of the tool with these values."""
    given = [p.phrase.format(values[p.name]) for p in tool.parameters]
    rng.shuffle(given)
    what = " ".join([tool.noun, *given])
    way: str = rng.choice(_PHRASES["requests"])
    if tool.verb in {"get", "find", "show", "check", "fetch", "read"} and rng.random() < 0.4:
        way = rng.choice(
            [
                "What is the {w}?",
                "I need the {w}.",
                "Tell me the {w}.",
                "What's the {w}?",
                "How is the {w}?",
            ]
        )
    if rng.random() < 0.1:
        return f"Use {tool.name} " + " ".join(given)
    text = way.format(V=tool.verb.capitalize(), v=tool.verb, w=what)
    return text.rstrip(".?") if text.endswith(('".', '"?')) else text


def declared(tools: Sequence[Tool]) -> Sequence[Mapping[str, Any]]:
    """The field `tools` of the chat API."""
    return [tool.declaration() for tool in tools]

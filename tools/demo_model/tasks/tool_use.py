"""Call the right one of the tools that are offered, and answer from its result."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tools.demo_model.conversation import Exchange, Message, Task, assistant, user
from tools.demo_model.phrases import phrases
from tools.demo_model.sentences import code_word, sentence, thing
from tools.demo_model.words import Words, made_up_word, number

_PHRASES = phrases("tool_use")
_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "clear")
_STATES = ("open", "closed", "ready", "pending", "sent", "lost", "busy", "free", "done", "late")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool: how it is declared, and how people give it in a request."""

    name: str
    type: str
    description: str
    phrase: str  # with {} for the value
    value: Callable[[Words, random.Random], str | int]

    def schema(self) -> Mapping[str, str]:
        declared = {"type": self.type, "description": self.description}
        return {name: text for name, text in declared.items() if text}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the API offers it, with what it takes to ask for it."""

    verb: str
    noun: str
    name: str
    parameters: Sequence[Parameter]

    description: str

    def declaration(self) -> Mapping[str, Any]:
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


@dataclass(frozen=True)
class ToolCall:
    """From the request to the call."""

    name: str = "tools"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        tools = _offered(words, rng)
        tool = rng.choice(tools)
        values = _values(tool, words, rng)
        return Exchange([user(_request(tool, values, rng)), _call(tool, values)], _declared(tools))


@dataclass(frozen=True)
class ToolAnswer:
    """From the request over the call and its result to the answer."""

    name: str = "tool answer"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        tools = _offered(words, rng)
        tool = rng.choice(tools)
        values = _values(tool, words, rng)
        result, answer = rng.choice([_fields, _fields, _one_value, _plain, _failure])(words, rng)
        messages = [
            user(_request(tool, values, rng)), _call(tool, values),
            {"role": "tool", "content": result, "tool_call_id": "call_1", "name": tool.name},
            assistant(answer),
        ]  # fmt: skip
        if rng.random() < 0.25 and tool.parameters:
            values = _values(tool, words, rng)
            messages += [user(_request(tool, values, rng)), _call(tool, values)]
        return Exchange(messages, _declared(tools))


@dataclass(frozen=True)
class ToolsUnused:
    """Tools are offered, and the user wants something else."""

    other: Task
    name: str = "tools unused"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        return Exchange(self.other.exchange(words, rng).messages, _declared(_offered(words, rng)))


@dataclass(frozen=True)
class AnyNames:
    """Tools and parameters have any noun or made-up word for a name: names are to be copied."""

    task: Task

    @property
    def name(self) -> str:
        return self.task.name

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        names = [*words.lists["nouns"], *(made_up_word(rng) for _ in range(100))]
        return self.task.exchange(
            Words({**words.lists, "tool_nouns": names, "parameters": names}), rng
        )


@dataclass(frozen=True)
class AnyValues:
    """People, cities and days are called alike: for which parameter a value is, the tools say."""

    task: Task

    @property
    def name(self) -> str:
        return self.task.name

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        lists, made_up = words.lists, [made_up_word(rng).capitalize() for _ in range(50)]
        values = [*lists["names"], *lists["cities"], *lists["days"], *made_up]
        return self.task.exchange(
            Words({**lists, "names": values, "cities": values, "days": values}), rng
        )


def _offered(words: Words, rng: random.Random) -> list[Tool]:
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


def _named_parameter(name: str, rng: random.Random) -> Parameter:
    """A parameter that the request calls by its name."""
    phrase = rng.choice(["with {n} {{}}", "{n} {{}}", "with the {n} {{}}", "and {n} {{}}"]).format(
        n=name
    )
    if rng.random() < 0.35:
        return Parameter(name, "integer", f"The {name}.", phrase, _count)
    return Parameter(name, "string", f"The {name}.", phrase, _word)


def _values(tool: Tool, words: Words, rng: random.Random) -> Mapping[str, str | int]:
    return {p.name: p.value(words, rng) for p in tool.parameters}


def _request(tool: Tool, values: Mapping[str, str | int], rng: random.Random) -> str:
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


def _call(tool: Tool, values: Mapping[str, str | int]) -> Message:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": tool.name, "arguments": json.dumps(values, ensure_ascii=False)},
    }
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _declared(tools: Sequence[Tool]) -> Sequence[Mapping[str, Any]]:
    return [tool.declaration() for tool in tools]


def _fields(words: Words, rng: random.Random) -> tuple[str, str]:
    """An object of several fields."""
    keys = words.several("parameters", rng.randint(2, 3), rng)
    values = {key: _result(words, rng) for key in keys}
    said = [f"the {key} is {value}" for key, value in values.items()]
    text = ", ".join(said[:-1]) + " and " + said[-1] + "."
    return json.dumps(values), text[0].upper() + text[1:]


def _one_value(words: Words, rng: random.Random) -> tuple[str, str]:
    key = rng.choice(["result", "answer", "value", "status", words.one("parameters", rng)])
    value = _result(words, rng)
    return json.dumps({key: value}), f"The {key} is {value}."


def _plain(words: Words, rng: random.Random) -> tuple[str, str]:
    text = rng.choice([sentence(words, rng), str(_result(words, rng))])
    return text, f"The answer is: {text}"


def _failure(words: Words, rng: random.Random) -> tuple[str, str]:
    reason = rng.choice(
        ["not found", "timeout", "no permission", f"unknown {words.one('parameters', rng)}"]
    )
    return json.dumps({"error": reason}), f"That did not work: {reason}."


def _result(words: Words, rng: random.Random) -> str | int:
    results: list[str | int] = [
        number(rng),
        rng.choice(_SKIES),
        rng.choice(_STATES),
        thing(words, rng),
    ]
    return rng.choice(results)

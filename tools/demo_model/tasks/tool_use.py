"""Conversations with tools: calls, answers from results, and cases in which none is called."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tools.demo_model.conversation import Exchange, Message, Task, assistant, turns, user
from tools.demo_model.phrases import phrases
from tools.demo_model.sentences import code_word, sentence, thing
from tools.demo_model.tasks.toolbox import LINKS, Tool, declared, offered, request, values_for
from tools.demo_model.tasks.unknown import I_DO_NOT_KNOW
from tools.demo_model.words import Words, made_up_word, number

_PHRASES = phrases("tool_use")
_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "clear")
_STEPS = (1, 1, 1, 2, 2, 2, 3, 3, 4, 9)
_STATES = ("open", "closed", "ready", "pending", "sent", "lost", "busy", "free", "done", "late")


@dataclass(frozen=True)
class ToolCall:
    """A request, and the call that it needs."""

    name: str = "tools"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        tools = offered(words, rng)
        tool = rng.choice(tools)
        values = values_for(tool, words, rng)
        return Exchange([user(request(tool, values, rng)), _calls((tool, values))], declared(tools))


@dataclass(frozen=True)
class ToolAnswer:
    """A request, the call, its result, and the answer from it."""

    name: str = "tool answer"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        tools = offered(words, rng)
        tool = rng.choice(tools)
        values = values_for(tool, words, rng)
        result, answer = rng.choice([_fields, _fields, _one_value, _plain, _failure])(words, rng)
        messages = [
            user(request(tool, values, rng)), _calls((tool, values)),
            _result_of(tool, result),
            assistant(answer),
        ]  # fmt: skip
        if rng.random() < 0.25 and tool.parameters:
            values = values_for(tool, words, rng)
            messages += [user(request(tool, values, rng)), _calls((tool, values))]
        return Exchange(messages, declared(tools))


@dataclass(frozen=True)
class ParallelCalls:
    """Two requests in one message, both calls in one answer, and sometimes their results."""

    name: str = "parallel calls"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        tools = offered(words, rng)
        chosen = [rng.choice(tools), rng.choice(tools)]
        values = [values_for(tool, words, rng) for tool in chosen]
        first, second = (request(t, v, rng) for t, v in zip(chosen, values, strict=True))
        way: str = rng.choice(_PHRASES["both"])
        asked = way.format(
            A=first, a=first.rstrip(".?"), B=second, b=second[0].lower() + second[1:]
        )
        messages = [user(asked), _calls(*zip(chosen, values, strict=True))]
        if rng.random() < 0.4:
            answers: list[str] = []
            for call, tool in enumerate(chosen, 1):
                result, answer = _one_value(words, rng)
                messages.append(_result_of(tool, result, call))
                answers.append(answer)
            messages.append(assistant(" ".join(answers)))
        return Exchange(messages, declared(tools))


@dataclass(frozen=True)
class ToolSteps:
    """A tool whose result names the argument of the next call, until one does not."""

    name: str = "tool steps"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        first, *others = offered(words, rng)
        link = rng.choice(LINKS)
        tool = replace(first, parameters=[link])
        key = code_word(rng)
        messages = [user(request(tool, {link.name: key}, rng)), _calls((tool, {link.name: key}))]
        for _ in range(rng.choice(_STEPS)):
            key = code_word(rng)
            result = json.dumps({**_part(words, rng), "next": key})
            messages += [_result_of(tool, result), _calls((tool, {link.name: key}))]
        result, answer = _one_value(words, rng)
        if rng.random() < 0.5:
            messages += [_result_of(tool, result), assistant(answer)]
        return Exchange(messages, declared(rng.sample([tool, *others], len(others) + 1)))


@dataclass(frozen=True)
class ToolsUnused:
    """Tools are offered, but the request needs none."""

    others: Sequence[Task]
    name: str = "tools unused"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        messages = rng.choice(self.others).exchange(words, rng).messages
        return Exchange(messages, declared(offered(words, rng)))


@dataclass(frozen=True)
class NoTools:
    """A request for a tool where none is offered."""

    name: str = "no tools"

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        tool = rng.choice(offered(words, rng))
        return turns(request(tool, values_for(tool, words, rng), rng), I_DO_NOT_KNOW)


@dataclass(frozen=True)
class AnyNames:
    """A task in which any noun or made-up word names a tool or parameter: names must be copied."""

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
    """A task in which people, cities and days share names: only the declarations tell which
    parameter a value is for.
    """

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


def _calls(*calls: tuple[Tool, Mapping[str, str | int]]) -> Message:
    """The assistant's message that calls tools with values."""
    made = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": tool.name, "arguments": json.dumps(values, ensure_ascii=False)},
        }
        for index, (tool, values) in enumerate(calls, 1)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _result_of(tool: Tool, content: str, call: int = 1) -> Message:
    return {
        "role": "tool", "content": content, "tool_call_id": f"call_{call}", "name": tool.name,
    }  # fmt: skip


def _part(words: Words, rng: random.Random) -> Mapping[str, str | int]:
    """What a result holds besides the next step: nothing, or one field."""
    if rng.random() < 0.5:
        return {}
    return {words.one("parameters", rng): _result(words, rng)}


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

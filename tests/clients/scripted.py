"""A scripted model that plays the scenario, whichever client asks and in whatever order: what it
says depends on the prompt and on what the answer must be."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.types import NO_REPLAYS, GrammarKind, Replay, Request
from tests.clients.scenario import CITY, DAY, DEGREES, REASONING, SKY, WEATHER
from tests.contract.fake_engine import CARD, ByteTokenizer, FakeEngine

REPORT = f"It will be {SKY}, with {DEGREES} degrees."


@dataclass(frozen=True)
class AgentTokenizer(ByteTokenizer):
    """Writes the names of the tools before the messages; its formats are Hermes' and `<think>`."""

    chat_template: str = '<think> </think> <tool_call>{"name": </tool_call>'

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: Any,
    ) -> list[int]:
        names = [tool["function"]["name"] for tool in template_arguments.get("tools", ())]
        return [*f"<tools>{' '.join(names)}\n".encode(), *super().apply_chat_template(messages)]


class AgentEngine(FakeEngine):
    """Calls `get_weather` if it is offered and has not answered yet, then any other tool that is
    offered, with a weather report; else says it. Free answers begin with reasoning."""

    def __init__(self) -> None:
        super().__init__(
            card=replace(CARD, max_context_tokens=8192, eos_token_ids=frozenset()),
            tokenizer=AgentTokenizer(),
        )

    def _answer(self, request: Request, index: int) -> bytes:
        return _answer(request).encode()


def _answer(request: Request) -> str:
    prompt = bytes(request.prompt).decode(errors="replace")
    grammar = request.constraint.grammar if request.constraint else None
    if grammar and grammar.kind is GrammarKind.JSON_SCHEMA:
        return WEATHER
    offered = re.match("<tools>(.*)\n", prompt)
    names = offered[1].split() if offered else []
    if "get_weather" in names and "\n<tool>" not in prompt:
        return _thought(_call("get_weather", {"city": CITY, "day": DAY}))
    others = [name for name in names if name != "get_weather"]
    if others:
        return _thought(_call(others[0], json.loads(WEATHER)))
    return _thought(REPORT)


def _thought(answer: str) -> str:
    return f"<think>\n{REASONING}\n</think>\n\n{answer}"


def _call(name: str, arguments: Mapping[str, object]) -> str:
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

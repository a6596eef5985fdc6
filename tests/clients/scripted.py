"""A scripted model that plays the scenario, whichever client asks and in whatever order: what it
says depends on the prompt and on what the answer must be."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from engine.values.images import Detail, Image, PreparedImage
from engine.values.model import NO_REPLAYS, Replay
from engine.values.output import OutputEvent
from engine.values.request import GrammarKind, Request
from tests.clients.scenario import (
    CITY,
    DAY,
    DEFERRED,
    ENDLESS,
    FORECAST,
    QUESTION,
    READ_PICTURE,
    REASONING,
    SEARCH,
    UNKNOWN_FORECAST,
    WEATHER,
    WEATHER_COMMAND,
)
from tests.contract.fake_engine import (
    END_OF_TEXT,
    PLACEHOLDER,
    SEEING,
    ByteTokenizer,
    FakeEngine,
    Gate,
)

CONTEXT_TOKENS = 1 << 18  # the first prompts of coding agents have tens of thousands of bytes

OPENING_CALLS: Mapping[str, Mapping[str, object]] = {
    "get_weather": {"city": CITY, "day": DAY},
    "exec_command": {"cmd": WEATHER_COMMAND},  # Codex
    "functions__exec": {  # Codex, for models that it knows
        "input": f"text((await tools.exec_command({{cmd: {json.dumps(WEATHER_COMMAND)}}})).output)"
    },
    "Bash": {"command": WEATHER_COMMAND, "description": "Ask the station"},  # Claude Code
    "bash": {"command": WEATHER_COMMAND, "description": "Ask it"},  # OpenCode, pi, Copilot
    "run_commands": {"commands": [WEATHER_COMMAND]},  # Cline
}
"""The tools that know the weather, and how each is asked."""

CALL_TOKEN = 255  # no byte of any text; where no call may be made, this token is forbidden

TOOLS = re.compile(r"<tools>\n((?:\{.*\n)+)</tools>\n")
"""As the tokenizer writes them, a line each."""

LATE_TOOLS = re.compile(r"can be called, too:\n((?:\{.*\n)+)")
"""As the server describes those that come in the midst of a conversation."""

HANDOVER = re.compile(r"summary produced by the other language model[^\n]*\n(.*degrees\.)")
"""As Codex goes on from a summary, which is what this model has said before."""

PICTURE_TO_READ = re.compile(READ_PICTURE.replace("{path}", r"(\S+)"))

FORECAST_IN_JSON = re.compile(r'"sky\\*": \\*"(\w+)\\*", \\*"degrees\\*": (\d+)')

EDIT = f"""forecast.txt
```
<<<<<<< SEARCH
{UNKNOWN_FORECAST}
=======
{FORECAST}
>>>>>>> REPLACE
```
"""
"""As aider wants it."""


@dataclass(frozen=True)
class AgentTokenizer(ByteTokenizer):
    """Writes tools as Qwen's template does, behind the system's message, so that two prompts
    share what they would there. Its formats are Hermes' and `<think>`.
    """

    chat_template: str = '<think> </think> <tool_call>{"name": </tool_call>'
    added_tokens: Mapping[str, int] = field(
        default_factory=lambda: {"<|end|>": END_OF_TEXT, "<tool_call>": CALL_TOKEN}
    )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: Any,
    ) -> list[int]:
        offered = template_arguments.get("tools") or ()
        tools = "".join(f"{json.dumps(tool['function'])}\n" for tool in offered)
        head = [message for message in messages[:1] if message["role"] in {"system", "developer"}]
        system = super().apply_chat_template(head, add_generation_prompt=False)
        rest = super().apply_chat_template(messages[len(head) :])
        return [*system, *f"<tools>\n{tools}</tools>\n".encode(), *rest]


class AgentEngine(FakeEngine):
    """Calls the tool that knows the weather if one is offered and has not answered yet, then the
    only other tool that is offered, with a weather report; else says what the tool said, or edits
    the forecast that it sees. Where a tool is deferred, it can be told to fetch it and to call it.
    Of images it sees the size, and it reads a file with one where it can. Free answers begin with
    reasoning. If it is told to go on until it is stopped, no answer ends.
    """

    def __init__(self) -> None:
        card = replace(
            SEEING,
            max_context_tokens=CONTEXT_TOKENS,
            arena_tokens=CONTEXT_TOKENS,
            eos_token_ids=frozenset(),
        )
        super().__init__(card=card, tokenizer=AgentTokenizer())

    async def prepare_image(self, source: str, folder: str, detail: Detail) -> PreparedImage:
        """Any image that Pillow reads. Its grid is its size in pixels."""
        return await asyncio.to_thread(_prepared, Path(source), Path(folder))

    def _answer(self, request: Request, index: int) -> bytes:
        return _answer(request).encode()

    async def _events(self, request: Request, live: Set[int]) -> AsyncGenerator[OutputEvent, None]:
        async for event in super()._events(request, live):
            if event.finish_reason and ENDLESS in _text(request):
                await self._passed_or_stopped(Gate())
            yield event


def _prepared(source: Path, folder: Path) -> PreparedImage:
    from PIL import Image as Picture  # noqa: PLC0415 - not every environment has it

    with Picture.open(source) as opened:
        size = opened.size
    digest = blake3(source.read_bytes()).digest()
    file = shutil.copy(source, folder / f"{digest.hex()}.npy")
    tokens = (ord("["), *[PLACEHOLDER] * 4, ord("]"))
    return PreparedImage(Image(digest, ((1, 4),), size, str(file)), tokens)


def _answer(request: Request) -> str:
    prompt = _text(request)
    grammar = request.constraint.grammar if request.constraint else None
    if grammar and grammar.kind is GrammarKind.JSON_SCHEMA:
        return WEATHER
    names = list(_offered(prompt))
    if special := _of_another_question(request, prompt, names):
        return _thought(special)
    opening = next((name for name in OPENING_CALLS if name in names), None)
    is_answered = "\n<tool>" in prompt or HANDOVER.search(prompt)
    if opening and QUESTION in prompt and not is_answered:
        return _thought(_call(opening, OPENING_CALLS[opening]))
    others = [name for name in names if name != opening]
    if len(others) == 1:
        return _thought(_call(others[0], json.loads(WEATHER)))
    if UNKNOWN_FORECAST in prompt:
        return _thought(EDIT)
    return _thought(_report(prompt))


def _of_another_question(request: Request, prompt: str, names: Sequence[str]) -> str:
    """The answer about a picture or a deferred tool; empty where the question is about neither."""
    if request.images:
        width, height = request.images[-1].grid
        return f"It has {width} x {height} pixels."
    if (path := PICTURE_TO_READ.search(prompt)) and "Read" in names:
        return _call("Read", {"file_path": path[1]})
    return _fetching(prompt, names) if SEARCH in prompt and "ToolSearch" in names else ""


def _offered(prompt: str) -> Iterator[str]:
    """The names of the tools at its head, then of those that came later."""
    for found in (*TOOLS.findall(prompt)[:1], *LATE_TOOLS.findall(prompt)):
        for line in found.splitlines():
            tool = json.loads(line)
            yield tool.get("function", tool)["name"]


def _fetching(prompt: str, names: Sequence[str]) -> str:
    """The call that fetches the deferred tool, then one of it if the prompt describes it."""
    n_results = prompt.count("\n<tool>")
    if n_results == 0:
        return _call("ToolSearch", {"query": f"select:{DEFERRED}", "max_results": 1})
    if n_results == 1 and DEFERRED in names:
        return _call(DEFERRED, {"task_id": "1"})
    return _report(prompt)


def _report(prompt: str) -> str:
    """What the last tool said, perhaps within a string, and nothing of one's own."""
    if summed_up := HANDOVER.search(prompt):
        return summed_up[1]
    results = prompt.split("\n<tool>")[1:]
    said = FORECAST_IN_JSON.search(results[-1]) if results else None
    return f"It will be {said[1]}, with {said[2]} degrees." if said else "I am only a script."


def _text(request: Request) -> str:
    return bytes(request.prompt).decode(errors="replace")


def _thought(answer: str) -> str:
    return f"<think>\n{REASONING}\n</think>\n\n{answer}"


def _call(name: str, arguments: Mapping[str, object]) -> str:
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

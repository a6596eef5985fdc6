"""Scores the trained model on prompts that it has never seen, through the daemon's own engine."""

import asyncio
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.api import Engine
from engine.launch import launch
from engine.values.output import FinishReason
from engine.values.request import Request, SamplingParams
from engine.values.settings import EngineConfig
from engine.values.tokens import pack
from tools.demo_model.conversation import Message, Task
from tools.demo_model.curriculum import system_prompt
from tools.demo_model.tasks.knowledge import Knowledge, SmallTalk, questions
from tools.demo_model.tasks.pick import LookUp, Pick
from tools.demo_model.tasks.recall import Recall
from tools.demo_model.tasks.repeat import Repeat
from tools.demo_model.tasks.tool_use import (
    NoTools,
    ParallelCalls,
    ToolAnswer,
    ToolCall,
    ToolSteps,
    ToolsUnused,
)
from tools.demo_model.tasks.unknown import Unknown
from tools.demo_model.words import Words, split_words
from tools.events import events_of

_PROMPTS_PER_TASK = 200
_MAX_TOKENS = 256
_CALL = "<tool_call>\n(.*?)\n</tool_call>"
_CALLS = f"{_CALL}(?:\n{_CALL})*"
_TASKS: Sequence[Task] = (
    Unknown("held_out"), Repeat(), Pick(), LookUp(), Recall(), ToolCall(), ToolAnswer(),
    ParallelCalls(), ToolSteps(), NoTools(),
    ToolsUnused((Knowledge("held_out"), Unknown("held_out"), Repeat())), SmallTalk(),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out prompt of one task and the assistant's message that it asks for."""

    task: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]]
    expected: Message


@dataclass(frozen=True, slots=True)
class Score:
    """The results of one task: numbers of questions."""

    task: str
    right: int
    stopped: int  # ended by the model itself, not by the limit
    asked: int


def held_out(words: Words, seed: int) -> Iterator[Question]:
    """Prompts of held-out words, names, tools and values, and the held-out ways to ask."""
    rng = random.Random(f"held out/{seed}")
    for text, answer in questions("held_out"):
        messages = [*system_prompt(rng), {"role": "user", "content": text}]
        yield Question("rootstock", messages, (), {"role": "assistant", "content": answer})
    for task in _TASKS:
        for _ in range(_PROMPTS_PER_TASK):
            exchange = task.exchange(words, rng)
            *before, expected = exchange.messages
            yield Question(task.name, [*system_prompt(rng), *before], exchange.tools, expected)


def is_right(question: Question, text: str) -> bool:
    """Whether the text is the expected one, or calls the expected functions in the expected order
    with equal arguments.
    """
    if "tool_calls" not in question.expected:
        return text == str(question.expected["content"])
    functions = [call["function"] for call in question.expected["tool_calls"]]
    expected = [{"name": f["name"], "arguments": json.loads(f["arguments"])} for f in functions]
    if not re.fullmatch(_CALLS, text, re.DOTALL):
        return False
    try:
        return [json.loads(call) for call in re.findall(_CALL, text, re.DOTALL)] == expected
    except json.JSONDecodeError:
        return False


def score_checkpoint(directory: Path, seed: int) -> list[Score]:
    """The scores of a checkpoint, which an engine decodes greedily for each held-out question."""
    _, words = split_words()
    return asyncio.run(_score(directory, list(held_out(words, seed))))


async def _score(directory: Path, questions: Sequence[Question]) -> list[Score]:
    config = EngineConfig(model=str(directory), max_waiting=10_000)
    engine = await launch(config, print)
    answers = await asyncio.gather(
        *(_answer(engine, index, question) for index, question in enumerate(questions))
    )
    await engine.drain(timeout_seconds=10)
    by_task: dict[str, list[tuple[bool, bool]]] = {}
    for question, (text, stopped) in zip(questions, answers, strict=True):
        by_task.setdefault(question.task, []).append((is_right(question, text), stopped))
    return [
        Score(task, sum(r for r, _ in results), sum(s for _, s in results), len(results))
        for task, results in by_task.items()
    ]


async def _answer(engine: Engine, index: int, question: Question) -> tuple[str, bool]:
    """The model's text, and whether it stopped by itself."""
    tools = {"tools": list(question.tools)} if question.tools else {}
    prompt = engine.tokenizer.apply_chat_template(question.messages, **tools)
    request = Request(f"question-{index}", pack(prompt), _MAX_TOKENS, SamplingParams(temperature=0))
    text, reason = "", None
    async for event in events_of(engine, request):
        text += event.text
        reason = event.finish_reason
    return text, reason is FinishReason.STOP

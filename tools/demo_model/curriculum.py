"""The curriculum: the tasks, their shares by step, and how they are joined into conversations."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tools.demo_model.conversation import Exchange, Message, Task
from tools.demo_model.phrases import phrases
from tools.demo_model.tasks.knowledge import Knowledge, SmallTalk
from tools.demo_model.tasks.pick import LookUp, Pick, PickOrLookUp
from tools.demo_model.tasks.recall import Recall
from tools.demo_model.tasks.repeat import Repeat
from tools.demo_model.tasks.tool_use import (
    AnyNames,
    AnyValues,
    NoTools,
    ParallelCalls,
    ToolAnswer,
    ToolCall,
    ToolSteps,
    ToolsUnused,
)
from tools.demo_model.tasks.unknown import Unknown
from tools.demo_model.words import Words

_PHRASES = phrases("curriculum")
Shares = Sequence[tuple[Task, float]]
"""Tasks, and the share of each."""

_UNUSED = ToolsUnused((Knowledge("ask"), Unknown("ask"), SmallTalk(), Repeat()))
_TALK: Shares = (
    (Knowledge("ask"), 0.14),
    (Unknown("ask"), 0.12),
    (SmallTalk(), 0.03),
    (NoTools(), 0.03),
    (_UNUSED, 0.05),
)
"""Questions with known and unknown answers, and conversations in which no tool is called."""

COPYING: Shares = (
    (Repeat(), 0.50),
    (PickOrLookUp(), 0.20),
    (Recall(), 0.20),
    (Knowledge("ask"), 0.06),
    (SmallTalk(), 0.02),
    (Unknown("ask"), 0.02),
)
"""For the beginning: short prompts, most of which contain their answer."""

ALL: Shares = (
    (Repeat(), 0.20),
    (PickOrLookUp(), 0.17),
    (Recall(), 0.12),
    (ToolCall(), 0.17),
    (ToolAnswer(), 0.07),
    (ParallelCalls(), 0.03),
    (ToolSteps(), 0.02),
    *_TALK,
)

HARD: Shares = (
    (Repeat(), 0.07),
    (PickOrLookUp(), 0.32),
    (Recall(), 0.06),
    (ToolCall(), 0.07),
    (AnyNames(ToolCall()), 0.16),
    (ToolAnswer(), 0.04),
    (AnyNames(ToolAnswer()), 0.07),
    (ParallelCalls(), 0.02),
    (ToolSteps(), 0.02),
    *_TALK,
)
"""More of what takes longest to learn: counting, and copying names that are not in the training."""

LAST: Shares = (
    (Repeat(), 0.07),
    (Pick(), 0.16),
    (LookUp(), 0.22),
    (Recall(), 0.06),
    (ToolCall(), 0.07),
    (AnyNames(ToolCall()), 0.13),
    (ToolAnswer(), 0.03),
    (AnyNames(ToolAnswer()), 0.05),
    (ParallelCalls(), 0.02),
    (ToolSteps(), 0.02),
    *_TALK,
)
"""More of what is weakest by then: looking up who has what."""

FINISH: Shares = (
    (Repeat(), 0.07),
    (Pick(), 0.16),
    (LookUp(), 0.10),
    (Recall(), 0.06),
    (ToolCall(), 0.05),
    (AnyNames(ToolCall()), 0.13),
    (AnyValues(ToolCall()), 0.15),
    (ToolAnswer(), 0.03),
    (AnyNames(ToolAnswer()), 0.04),
    (AnyNames(ParallelCalls()), 0.02),
    (ToolSteps(), 0.02),
    *_TALK,
)
"""More of tools for which the declarations alone tell the parameter of a value."""

REFINE: Shares = (
    (Knowledge("ask"), 0.18),
    (Unknown("ask"), 0.18),
    (SmallTalk(), 0.02),
    (NoTools(), 0.02),
    (_UNUSED, 0.04),
    (Repeat(), 0.06),
    (Pick(), 0.05),
    (LookUp(), 0.05),
    (Recall(), 0.08),
    (ToolCall(), 0.14),
    (AnyNames(ToolCall()), 0.10),
    (AnyValues(ToolCall()), 0.10),
    (ToolAnswer(), 0.02),
    (AnyNames(ToolAnswer()), 0.01),
    (ParallelCalls(), 0.03),
    (ToolSteps(), 0.01),
)
"""For trained weights: new facts, and enough of the rest that it is not forgotten."""

Stages = Sequence[tuple[int, Shares]]
"""Shares, and the first step at which they are trained, in order."""

FROM_NOTHING: Stages = ((0, COPYING), (400, ALL), (2400, HARD), (3200, LAST), (4700, FINISH))
FROM_WEIGHTS: Stages = ((0, REFINE),)


def shares_at(stages: Stages, step: int) -> Shares:
    """The shares that are trained at this step."""
    return next(shares for first, shares in reversed(stages) if first <= step)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as the chat template takes it. The last message is the assistant's."""

    messages: Sequence[Message]
    tools: Sequence[Any]


def conversation(exchanges: int, shares: Shares, words: Words, rng: random.Random) -> Conversation:
    """Generate a conversation of independent exchanges, with the tools of all of them."""
    tasks, weights = zip(*shares, strict=True)
    parts: list[Exchange] = [
        task.exchange(words, rng) for task in rng.choices(tasks, weights, k=exchanges)
    ]
    messages = system_prompt(rng) + [message for part in parts for message in part.messages]
    tools = {t["function"]["name"]: t for part in parts for t in part.tools}
    return Conversation(messages, list(tools.values()))


def conversations(shares: Shares, words: Words, rng: random.Random) -> Iterator[Conversation]:
    """Yield conversations without end: most have one exchange, some two or three."""
    while True:
        yield conversation(rng.choice([1, 1, 1, 1, 2, 2, 3]), shares, words, rng)


def system_prompt(rng: random.Random) -> list[Message]:
    """A system prompt for about a third of the conversations, else none."""
    if rng.random() < 0.65:
        return []
    return [{"role": "system", "content": rng.choice(_PHRASES["system_prompts"])}]

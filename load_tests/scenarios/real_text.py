"""Questions about Python's standard library, whose texts every machine has, for a real model."""

import hashlib
import inspect
import pkgutil
from dataclasses import dataclass
from typing import assert_never

from load_tests.client import Generation
from load_tests.scenarios.kinds import Part, Text
from load_tests.scenarios.load import Run, Summary, summarize
from load_tests.scenarios.workloads import Conversation, Workload

DIGEST_CHARACTERS = 12


@dataclass(frozen=True, slots=True)
class Wave:
    """All conversations, held once. `answers` has a digest of each answer's text, in the order of
    conversations and turns.
    """

    summary: Summary
    drafted_tokens: int
    accepted_tokens: int
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """One run of a text scenario. `prompts` is a digest of its prompts: equal digests are equal
    work. A later wave repeats the first one.
    """

    prompts: str
    waves: tuple[Wave, ...]

    @property
    def headline(self) -> str:
        """For a line of progress."""
        return "; ".join(wave.summary.headline for wave in self.waves)


def build_text(scenario: Text) -> Workload:
    """The scenario's workload. The same version of Python gives the same one everywhere."""
    manual = "\n\n".join(_read(name, "docstring") for name in scenario.manual)
    conversations = tuple(
        Conversation(
            system=scenario.system.format(manual=manual) if scenario.system else None,
            turns=(
                opening.format(name=name, text=_read(name, scenario.part)),
                *scenario.turns,
            ),
        )
        for opening in scenario.openings
        for name in scenario.texts
    )
    generation = Generation(scenario.output_tokens, 1, scenario.temperature, scenario.seed)
    return Workload(scenario.concurrency, generation, (conversations,) * scenario.waves)


def answered(workload: Workload, run: Run) -> Answered:
    """Add up what the workload came to, wave by wave."""
    return Answered(
        _digest(repr(workload.waves[0])),
        tuple(_wave(run, number) for number in range(len(workload.waves))),
    )


def _wave(run: Run, number: int) -> Wave:
    answers = sorted(
        (answer for answer in run.answers if answer.wave == number),
        key=lambda answer: (answer.conversation, answer.turn),
    )
    started = min(answer.started_seconds for answer in answers)
    ended = max(answer.started_seconds + answer.latency_seconds for answer in answers)
    return Wave(
        summary=summarize(Run(ended - started, tuple(answers))),
        drafted_tokens=sum(answer.drafted_tokens for answer in answers),
        accepted_tokens=sum(answer.accepted_tokens for answer in answers),
        answers=tuple(_digest(answer.text) for answer in answers),
    )


def _read(name: str, part: Part) -> str:
    """The text of a module, class or function by its dotted name; that of a string is the string.

    Raises ValueError if it has none, which is the case for docstrings under `python -OO`.
    """
    thing = pkgutil.resolve_name(name)
    if isinstance(thing, str):
        return thing.strip()
    match part:
        case "docstring":
            text = inspect.getdoc(thing)
        case "source":
            text = inspect.getsource(thing)
        case _:
            assert_never(part)
    if not text:
        raise ValueError(f"{name} has no {part}")
    return text.strip()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]

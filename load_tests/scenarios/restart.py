"""What has been answered is asked again: of the same daemon, after a stop, after a kill."""

import asyncio
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from load_tests.client import Listener, Message, Target, connected, limited, message
from load_tests.peers.catalogue import Server
from load_tests.processes import STOP_SECONDS
from load_tests.scenarios.kinds import Restart
from load_tests.scenarios.workloads import text

Ending = Literal["none", "SIGTERM", "SIGKILL"]
ENDINGS: tuple[Ending, ...] = ("none", "SIGTERM", "SIGKILL")

Start = Callable[[Path], AbstractContextManager[Server]]
"""A server that has been warmed up, with the home that it is given."""

Messages = Sequence[Message]


@dataclass(frozen=True, slots=True)
class Resent:
    """One prompt, cold and again. `ending` is how the daemon that knew it came to its end: "none"
    where it was asked again itself.
    """

    prompt: str
    ending: Ending
    prompt_tokens: int
    cached_tokens: int  # the second time
    cold_seconds: float  # to the first token
    again_seconds: float
    is_same_text: bool


@dataclass(frozen=True, slots=True)
class Restarted:
    """Every prompt with every ending."""

    resent: tuple[Resent, ...]

    def share(self, resent: Resent) -> float:
        """Of what memory would have given."""
        (memory,) = (
            one.cached_tokens
            for one in self.resent
            if (one.prompt, one.ending) == (resent.prompt, "none")
        )
        return resent.cached_tokens / memory

    @property
    def headline(self) -> str:
        """For a line of progress."""
        after = [one for one in self.resent if one.ending != "none"]
        sooner = statistics.median(one.cold_seconds / one.again_seconds for one in after)
        return (
            f"{min(map(self.share, after)):.1%} of what memory has, "
            f"first text {sooner:.1f} times sooner than cold"
        )


def play_restart(scenario: Restart, seed: int, start: Start) -> Restarted:
    """Each ending with fresh prompts' first answers and an empty disk. Raises TargetError."""
    prompts = _prompts(scenario, random.Random(seed))
    found = [one for ending in ENDINGS for one in _resent(scenario, prompts, ending, start)]
    return Restarted(tuple(found))


def _prompts(scenario: Restart, rng: random.Random) -> dict[str, Messages]:
    system = [
        message("system", text(rng, scenario.system_words)),
        message("user", text(rng, 10)),
    ]
    words = scenario.prompt_words // (2 * scenario.turns - 1)
    conversation = [
        message(("user", "assistant")[number % 2], text(rng, words))
        for number in range(2 * scenario.turns - 1)
    ]
    return {"system prompt": system, "conversation": conversation}


def _resent(
    scenario: Restart, prompts: Mapping[str, Messages], ending: Ending, start: Start
) -> Iterator[Resent]:
    with TemporaryDirectory(prefix="home-") as home:
        with start(Path(home)) as server:
            cold = asyncio.run(_ask(server.target, prompts, scenario.output_tokens))
            if ending == "none":
                again = asyncio.run(_ask(server.target, prompts, scenario.output_tokens))
            else:
                end(server, ending, scenario.idle_seconds, STOP_SECONDS)
        if ending != "none":
            with start(Path(home)) as server:
                again = asyncio.run(_ask(server.target, prompts, scenario.output_tokens))
    for name, (first, second) in zip(prompts, zip(cold, again, strict=True), strict=True):
        yield Resent(
            name,
            ending,
            prompt_tokens=second.usage["prompt_tokens"],
            cached_tokens=second.usage["prompt_tokens_details"]["cached_tokens"],
            cold_seconds=first.first_text_seconds,
            again_seconds=second.first_text_seconds,
            is_same_text=first.text == second.text,
        )


def end(server: Server, ending: Ending, idle_seconds: float, limit_seconds: float) -> None:
    """Send the signal, before a SIGKILL after `idle_seconds`, and wait for the process's end."""
    if ending == "SIGKILL":
        time.sleep(idle_seconds)
    server.process.send_signal(getattr(signal, ending))
    server.process.wait(limit_seconds)


async def _ask(
    target: Target, prompts: Mapping[str, Messages], output_tokens: int
) -> list[Listener]:
    """One after the other."""
    async with limited(target), connected(target) as asker:
        return [await asker.answered(messages, output_tokens) for messages in prompts.values()]

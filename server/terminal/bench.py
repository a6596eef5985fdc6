"""A short load test of any server with OpenAI's chat completions."""

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from threading import Event

from server.terminal.client.answer import Answer
from server.terminal.client.chat import ChatClient

WORDS = (
    *("apple", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island"),
    *("jungle", "kitchen", "ladder", "mirror", "needle", "orange", "pencil", "quarry", "river"),
    *("saddle", "tunnel", "umbrella", "valley", "window", "yellow", "zebra"),
)
TASK = "Count upwards from one, in words, and do not stop."  # so that the answer's limit ends it
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts, `at_once` of which are in progress at a time."""

    name: str
    prompts: tuple[str, ...]
    at_once: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a load. None where the server does not report a figure."""

    load: Load
    prompt_tokens: float | None  # these four are medians over the answers
    cached_tokens: float | None
    first_seconds: float | None
    tokens_per_second: float | None
    all_tokens_per_second: float | None  # of all answers together, prompts' time included


def loads(prompt_words: int, draw: random.Random) -> Iterator[Load]:
    """The loads in their order. Only the prompts of the long loads share a prefix, which is cold
    once and warm from then on.
    """

    def prompt() -> str:
        return f"{' '.join(draw.choices(WORDS, k=16))}. {TASK}"

    shared = " ".join(draw.choices(WORDS, k=prompt_words))

    def sharing() -> str:
        return f"{shared}. {prompt()}"

    yield Load("short, 1 at a time", tuple(prompt() for _ in range(4)), 1)
    yield Load(f"short, {AT_ONCE} at a time", tuple(prompt() for _ in range(16)), AT_ONCE)
    yield Load("long, cold", (sharing(),), 1)
    yield Load("long, warm, 1 at a time", tuple(sharing() for _ in range(4)), 1)
    yield Load(f"long, warm, {AT_ONCE} at a time", tuple(sharing() for _ in range(16)), AT_ONCE)


def play(load: Load, client: ChatClient) -> Measured:
    """Raises TerminalError for the first request that fails. It, or Ctrl-C, ends the others."""
    start, stopped = time.perf_counter(), Event()
    with ThreadPoolExecutor(load.at_once) as threads:
        try:
            asking = threads.map(lambda prompt: _answered(client, prompt, stopped), load.prompts)
            answers = list(asking)
        except BaseException:
            stopped.set()
            raise
    seconds = time.perf_counter() - start
    usages = [answer.usage for answer in answers if answer.usage is not None]
    generated = sum(usage.completion_tokens for usage in usages)
    return Measured(
        load,
        prompt_tokens=_median([usage.prompt_tokens for usage in usages]),
        cached_tokens=_median([usage.cached_tokens for usage in usages]),
        first_seconds=_median([answer.first_seconds for answer in answers]),
        tokens_per_second=_median([answer.tokens_per_second for answer in answers]),
        all_tokens_per_second=generated / seconds if usages else None,
    )


def _answered(client: ChatClient, prompt: str, stopped: Event) -> Answer:
    answer = Answer(time.perf_counter())
    with closing(client.answer([{"role": "user", "content": prompt}])) as events:
        for event in events:
            answer.add(event, time.perf_counter())
            if stopped.is_set():
                break
    return answer


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None

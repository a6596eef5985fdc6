"""The least time in which a load scenario could be served: `python -m load_tests.bench.floor
CHECKPOINT SCENARIO`. The scenario is a load as JSON, and the result is printed as JSON.

Each prompt token that was not sent before is computed once, at the speed of mlx-lm's bare model.
Every step has as many rows as the scenario has users, and takes as long as a step of the bare model
at the mean length of the conversations. There is no HTTP, no text and no waiting.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from pydantic import TypeAdapter

from engine.mlx_backend.cpu.blas import load_blas
from load_tests.client import message

if TYPE_CHECKING:
    from load_tests.scenarios.workloads import Conversation, Workload
    from measuring.engine_step import BareModel

PREFILL_TOKENS = 512
"""Prompt tokens of a forward whose speed is measured: as many as a step of the daemon has."""
REPEATS = 6
"""Forwards of prompt tokens that are measured; the first is not counted."""
STEPS = 60

Messages = Sequence[dict[str, str]]
CountTokens = Callable[[Messages], int]
"""Counts the tokens of a conversation up to the beginning of the next answer."""


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of a workload."""

    new_prompt_tokens: int
    steps: int
    rows: int  # in every step
    context_tokens: int  # of a row, on average


@dataclass(frozen=True, slots=True)
class Floor:
    """The work, and the time that the bare model takes for it."""

    work: Work
    prefill_tokens_per_second: float
    step_seconds: float
    seconds: float

    @property
    def headline(self) -> str:
        """The result for a line of progress."""
        return f"{self.seconds:.2f} s"


def least_work(workload: "Workload", count: CountTokens) -> Work:
    """Count each conversation's prompt tokens once, and a shared system prompt once. The tokens of
    answers are computed by steps. Only for workloads of one wave.
    """
    (conversations,) = workload.waves
    new_tokens, context_tokens, systems = 0, [], set()
    for conversation in conversations:
        first, last = _prompt(conversation, 1), _prompt(conversation, len(conversation.turns))
        said = (len(conversation.turns) - 1) * workload.output_tokens
        tokens = count(last) + said
        context_tokens.append((count(first) + tokens + workload.output_tokens) // 2)
        new_tokens += tokens - said
        if conversation.system in systems:
            new_tokens -= len((conversation.system or "").split())
        systems.add(conversation.system)
    answers = sum(len(conversation.turns) for conversation in conversations)
    return Work(
        new_prompt_tokens=new_tokens,
        steps=-(-answers * workload.output_tokens // workload.concurrency),
        rows=workload.concurrency,
        context_tokens=round(statistics.mean(context_tokens)),
    )


def _prompt(conversation: "Conversation", turns: int) -> Messages:
    """The messages that are sent in that turn, with empty answers."""
    system = [message("system", conversation.system)] if conversation.system else []
    first, *later = conversation.turns[:turns]
    pairs = [[message("assistant", ""), message("user", words)] for words in later]
    return [*system, message("user", first), *(one for pair in pairs for one in pair)]


def measure(bare: "BareModel", work: Work) -> Floor:
    """Measure the bare model, and compute its time for this work from medians."""
    prefills = []
    for _ in range(REPEATS):
        bare.begin(1, work.context_tokens)
        prefills.append(bare.prefill_seconds(PREFILL_TOKENS))
    bare.begin(work.rows, work.context_tokens - STEPS // 2)
    steps = [bare.step_seconds() for _ in range(STEPS)]
    prefill_tokens_per_second = PREFILL_TOKENS / statistics.median(prefills[1:])
    step_seconds = statistics.median(steps)
    return Floor(
        work=work,
        prefill_tokens_per_second=prefill_tokens_per_second,
        step_seconds=step_seconds,
        seconds=work.new_prompt_tokens / prefill_tokens_per_second + work.steps * step_seconds,
    )


def main(checkpoint: Path, scenario: str, seed: int = 0) -> None:
    """Print the floor of a load of one wave."""
    load_blas()
    from mlx_lm.tokenizer_utils import load as load_tokenizer  # noqa: PLC0415 - behind the BLAS

    from load_tests.scenarios.kinds import Load  # noqa: PLC0415
    from load_tests.scenarios.workloads import build  # noqa: PLC0415
    from measuring.engine_step import load_bare  # noqa: PLC0415

    tokenizer = load_tokenizer(checkpoint)

    def count(messages: Messages) -> int:
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    work = least_work(build(Load.model_validate_json(scenario), seed), count)
    floor = measure(load_bare(checkpoint), work)
    print(TypeAdapter(Floor).dump_json(floor).decode())


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)  # whoever started this reads them
    app.command()(main)
    app()

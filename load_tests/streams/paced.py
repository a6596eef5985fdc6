"""The daemon with all its parts but the model: tokens come at a given pace.

`python -m load_tests.streams.paced PORT ROWS TOKENS_PER_SECOND WORD`; the word is a token of the
demonstration model, and all that is said.
"""

import asyncio
import time
from collections import deque
from dataclasses import replace
from functools import partial

import typer
from uvicorn.loops.auto import auto_loop_factory

from engine.api import Report
from engine.build import assemble
from engine.core.inbox import Inbox
from engine.core.loop import Deliver
from engine.core.step import (
    Prefill,
    Prefilled,
    Row,
    RowResult,
    Sampled,
    SampledToken,
    StepMasks,
    StepPlan,
    StepResult,
    Verified,
    Verify,
)
from engine.mlx_backend.backend import load_backend
from engine.process.child import start_child
from engine.remote.engine import RemoteEngine
from engine.thread import EngineParts
from engine.values.settings import EngineConfig
from server.http.listening import listening
from server.settings import load_settings
from server.terminal.serve import serve_models

STREAM_BYTES = 4 * 2**20
"""KV for each stream: some 800 tokens of the demonstration model."""


class PacedRunner:
    """Implements `ModelRunner`: each step ends at the next beat, with the same token for all."""

    def __init__(self, token_id: int, tokens_per_second: float) -> None:
        self._token = SampledToken(token_id)
        self._period_seconds = 1 / tokens_per_second
        self._beat = time.monotonic()
        self._submitted: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See `ModelRunner.submit`."""
        self._submitted.append(plan)

    def launch(self) -> None:
        """See `ModelRunner.launch`."""

    def draw(self, masks: StepMasks) -> None:
        """See `ModelRunner.draw`."""

    def collect(self) -> StepResult:
        """See `ModelRunner.collect`."""
        results = tuple(map(self._result, self._submitted.popleft().rows))
        if any(isinstance(result, Sampled | Verified) for result in results):
            self._wait()
        return StepResult(results)

    def _result(self, row: Row) -> RowResult:
        match row:
            case Prefill(samples=False):
                return Prefilled()
            case Verify():
                return Verified((self._token,))
            case _:
                return Sampled(self._token)

    def _wait(self) -> None:
        """A beat that was missed is left out: nothing is caught up with."""
        now = time.monotonic()
        self._beat = max(self._beat + self._period_seconds, now)
        time.sleep(self._beat - now)


def load(
    tokens_per_second: float,
    word: str,
    config: EngineConfig,
    report: Report,
    inbox: Inbox,
    deliver: Deliver,
) -> EngineParts:
    """The parts of an engine on the demonstration model, its runner replaced."""
    backend = load_backend(config, report)
    (token_id,) = backend.tokenizer.encode(word, add_special_tokens=False)
    paced = replace(backend, runner=PacedRunner(token_id, tokens_per_second))
    return assemble(paced, config, report, inbox, deliver)


def main(port: int, rows: int, tokens_per_second: float, word: str) -> None:
    """Serve until SIGTERM."""
    settings = load_settings(
        {
            "port": port,
            "max_running": rows,
            "kv_cache_bytes": rows * STREAM_BYTES,
            "drain_timeout_seconds": 0,
        }
    )
    process = partial(start_child, "load_tests.streams.paced_engine", str(tokens_per_second), word)
    with (
        listening(settings.host, settings.port) as sockets,
        asyncio.Runner(loop_factory=auto_loop_factory()) as runner,
    ):
        runner.run(serve_models(settings, sockets, partial(RemoteEngine.start, process)))


if __name__ == "__main__":
    typer.run(main)

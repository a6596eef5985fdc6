"""What the daemon holds and counts of a body. All fields of all routes with all shapes:
`python -m tests.hostile.held`, in turns `--record FILE --minutes 8`, again and again. The tests try
a part.
"""

import gc
import select
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Annotated
from unittest import mock

import httpx
import typer

from server import app
from server.fairness import Budget
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import CARD, ByteTokenizer, FakeEngine, Gate, Script
from tests.contract.scripted import THINK
from tests.contract.wire import connected, request_head
from tests.hostile.attacks import FieldAttack, field_attacks
from tests.hostile.fields import fields
from tests.hostile.shapes import body, shapes
from tests.polling import WAIT_SECONDS, until

BODY_BYTES = 300_000
REQUEST_BYTES = 150_000
"""More than an HTTP request takes with a small body, its connection and the trace included."""
SEQUENCE_BYTES = 18_000
"""More than each sequence of the fake engine takes, four tasks at its gate among it."""
MANY_TOKENS = 10 * BODY_BYTES
SETTLED_BYTES = 20_000
UNTRIED = frozenset({"/api/pull", "/api/delete"})
"""Routes that a daemon without keys would obey: they change what is on the disk."""


@contextmanager
def counted() -> Iterator[list[Budget]]:
    """The budgets of bodies and of answers of the daemons that are started in the context."""
    found: list[Budget] = []

    def kept(make: Callable[[Settings], Budget]) -> Callable[[Settings], Budget]:
        def made(settings: Settings) -> Budget:
            found.append(budget := make(settings))
            return budget

        return made

    with ExitStack() as patches:
        for name in ("body_budget", "output_budget"):
            patches.enter_context(mock.patch.object(app, name, kept(getattr(app, name))))
        yield found


@contextmanager
def tracing() -> Iterator[Callable[[], int]]:
    """Returns the bytes of Python's memory that is in use, when the frames of workers are gone."""

    def traced_bytes() -> int:
        found = [0, 0]

        def is_settled() -> bool:
            time.sleep(0.02)
            gc.collect()
            found[:] = found[1], tracemalloc.get_traced_memory()[0]
            return abs(found[1] - found[0]) < SETTLED_BYTES

        until(is_settled)
        return found[1]

    gc.collect()
    gc.freeze()  # what is there already takes no time in the collections from here on
    tracemalloc.start()
    try:
        yield traced_bytes
    finally:
        tracemalloc.stop()
        gc.unfreeze()


@dataclass(frozen=True, slots=True)
class Holding:
    """What came of one body: what was held and counted while its answer was written, and what was
    held afterwards. A body that was refused has no answer.
    """

    is_accepted: bool
    held_bytes: int
    counted_bytes: int
    n_sequences: int
    left_bytes: int

    @property
    def most_bytes(self) -> int:
        return self.counted_bytes + REQUEST_BYTES + self.n_sequences * SEQUENCE_BYTES

    @property
    def passed(self) -> bool:
        return self.held_bytes <= self.most_bytes


@dataclass
class HeldDaemon:
    """A daemon whose answers wait at a gate, its budgets, and all attacks on its fields."""

    engine: FakeEngine
    url: str
    budgets: list[Budget]
    traced: Callable[[], int]
    attacks: list[FieldAttack]

    @property
    def counted_bytes(self) -> int:
        return sum(budget.total_bytes for budget in self.budgets)

    @contextmanager
    def _generating(self, content: bytes, attack: FieldAttack) -> Iterator[bool]:
        """Whether sequences are generated for this body; False where it is refused."""
        with connected(self.url) as connection:
            connection.sendall(request_head(content, path=attack.route))
            until(lambda: self.engine.at_gate.qsize() or select.select([connection], [], [], 0)[0])
            yield bool(self.engine.at_gate.qsize())
        n_begun = self.engine.at_gate.qsize()
        for _ in range(n_begun):
            self.engine.aborted.get(timeout=WAIT_SECONDS)
        self.engine.reset()
        self.engine.script = Script(gate=Gate())

    def holding(self, attack: FieldAttack) -> Holding:
        """Send a body of the attack, and look twice: while its answer is written, and after that.
        Nothing is counted afterwards.
        """
        # In use until after the second look.
        content = body(attack.field, shapes(attack.field)[attack.shape], BODY_BYTES)
        with self._generating(content, attack) as is_accepted:
            counted_bytes = self.counted_bytes
            with_it = self.traced()
            n_sequences = self.engine.submitted.qsize()  # all: nothing has happened for a while
        until(lambda: self.counted_bytes, lambda counted: counted == 0)
        left_bytes = self.traced()
        held_bytes = with_it - left_bytes
        return Holding(is_accepted, held_bytes, counted_bytes, n_sequences, left_bytes)


@contextmanager
def held_daemon() -> Iterator[HeldDaemon]:
    card = replace(CARD, max_context_tokens=MANY_TOKENS, arena_tokens=MANY_TOKENS)
    engine = FakeEngine(Script(gate=Gate()), card=card, tokenizer=ByteTokenizer(THINK))
    settings = Settings(port=0, tool_parser="hermes")
    with counted() as budgets, running(engine, settings) as url:
        document = httpx.get(f"{url}/openapi.json", timeout=WAIT_SECONDS).json()  # slow if traced
        found = field_attacks(fields(document))
        found = [one for one in found if one.method == "POST" and one.route not in UNTRIED]
        with tracing() as traced:
            yield HeldDaemon(engine, url, budgets, traced, found)


KEPT_BYTES = 96 << 20
"""What may be kept of all bodies together: responses, the memory of replays, of tools' grammars."""

HEADS = ("what is sent", "accepted", "held, bytes", "counted, bytes", "sequences", "left, bytes")


def main(
    record: Annotated[
        Path | None,
        typer.Option(help="A file for all rows. What it has already is not sent again."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Begin nothing after that time.")] = 1e9,
) -> None:
    """Send a costly value in every field of every route, and fail where more is held of it than the
    budgets count, or where much is kept.
    """
    ends, done = monotonic() + 60 * minutes, set[str]()
    if record is not None and record.exists():
        done = {line.split("\t")[0] for line in record.read_text("utf-8").splitlines()[1:]}
    elif record is not None:
        record.write_text("\t".join(HEADS) + "\n", "utf-8")
    n_failed, first_bytes = 0, None
    with held_daemon() as daemon:
        waiting = [one for one in daemon.attacks if one.name not in done]
        for n_made, attack in enumerate(waiting):
            if monotonic() > ends:
                print(f"not sent yet: {len(waiting) - n_made} of fields and shapes")
                break
            found = daemon.holding(attack)
            first_bytes = first_bytes or found.left_bytes
            row = (attack.name, found.is_accepted, found.held_bytes, found.counted_bytes)
            line = "\t".join(map(str, (*row, found.n_sequences, found.left_bytes)))
            if not found.passed or found.left_bytes > first_bytes + KEPT_BYTES:
                n_failed += 1
                print("FAILED", line, flush=True)
            elif record is not None:
                with record.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    sys.exit(bool(n_failed))


if __name__ == "__main__":
    cli = typer.Typer(pretty_exceptions_enable=False)
    cli.command()(main)
    cli()

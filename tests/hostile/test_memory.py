"""Whatever stands in the fields of a body, what is held of it while its answer is written is
counted in the budgets of the daemon.
"""

import random
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx
import pytest

from server.fairness import Budget
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import CARD, ByteTokenizer, FakeEngine, Gate, Script
from tests.contract.scripted import THINK
from tests.contract.wire import connected, request_head
from tests.hostile.fields import Field, fields
from tests.hostile.shapes import Shape, body, shapes
from tests.polling import WAIT_SECONDS, until

SEED = 67
N_ACCEPTED = 25
BODY_BYTES = 300_000
REQUEST_BYTES = 150_000
"""More than an HTTP request takes with a small body, its connection and the trace included."""
SEQUENCE_BYTES = 18_000
"""More than each sequence of the fake engine takes, four tasks at its gate among it."""
MANY_TOKENS = 10 * BODY_BYTES
ROUTES = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
    *("/api/chat", "/api/generate", "/api/embed", "/v1/embeddings", "/rerank", "/score"),
)


@dataclass
class HeldDaemon:
    """A daemon whose answers wait at a gate, and its budgets."""

    engine: FakeEngine
    url: str
    budgets: list[Budget]

    @property
    def counted_bytes(self) -> int:
        return sum(budget.total_bytes for budget in self.budgets)

    @contextmanager
    def generating(self, content: bytes, route: str) -> Iterator[bool]:
        """Whether sequences are generated for this body; False where it is refused."""
        with connected(self.url) as connection:
            connection.sendall(request_head(content, path=route))
            until(lambda: self.engine.at_gate.qsize() or select.select([connection], [], [], 0)[0])
            yield bool(self.engine.at_gate.qsize())
        n_begun = self.engine.at_gate.qsize()
        for _ in range(n_begun):
            self.engine.aborted.get(timeout=WAIT_SECONDS)
        self.engine.reset()
        self.engine.script = Script(gate=Gate())


@pytest.fixture
def held(budgets: list[Budget]) -> Iterator[HeldDaemon]:
    card = replace(CARD, max_context_tokens=MANY_TOKENS, arena_tokens=MANY_TOKENS)
    engine = FakeEngine(Script(gate=Gate()), card=card, tokenizer=ByteTokenizer(THINK))
    daemon = HeldDaemon(engine, "", budgets)
    with running(engine, Settings(port=0, tool_parser="hermes")) as daemon.url:
        yield daemon


def cases(url: str) -> list[tuple[Field, str, Shape]]:
    document = httpx.get(f"{url}/openapi.json", timeout=WAIT_SECONDS).json()
    found = [
        (one, name, shape)
        for one in fields(document)
        if one.route in ROUTES
        for name, shape in shapes(one).items()
    ]
    random.Random(SEED).shuffle(found)
    return found


def test_what_is_held_of_a_body_while_its_answer_is_written_is_counted(
    held: HeldDaemon, traced: Callable[[], int]
) -> None:
    n_accepted = 0
    for at, name, shape in cases(held.url):
        content = body(at, shape, BODY_BYTES)  # in use until after the second look
        with held.generating(content, at.route) as is_accepted:
            counted_bytes = held.counted_bytes
            with_it = traced()
            n_sequences = held.engine.submitted.qsize()  # all: nothing has happened for a while
        if not is_accepted:
            continue
        until(lambda: held.counted_bytes, lambda counted: counted == 0)
        held_bytes = with_it - traced()
        most = counted_bytes + REQUEST_BYTES + n_sequences * SEQUENCE_BYTES
        assert held_bytes <= most, (at.route, at.name, name, counted_bytes, n_sequences)
        n_accepted += 1
        if n_accepted == N_ACCEPTED:
            return
    pytest.fail(f"only {n_accepted} bodies were accepted")

"""What is held of images while answers about them are streamed."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from engine.values.images import Detail, PreparedImage
from server.fairness import Budget
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import IMAGE, SEEING, FakeEngine, Gate, Script
from tests.contract.wire import connected, request_head
from tests.hostile.image_bodies import DIALECTS, Dialect, base64_of
from tests.polling import WAIT_SECONDS, until

IMAGE_BYTES = 4 << 20
HELD_BYTES = 200_000
"""More than a request of text takes, its connection and the trace included."""

LEFT_BYTES = 50_000
"""More than a finished request leaves in the daemon's records."""

N_TURNS = 8


class OneToken(FakeEngine):
    """An engine for which one token stands for any image."""

    async def prepare_image(self, source: str, folder: str, detail: Detail) -> PreparedImage:
        prepared = await super().prepare_image(source, folder, Detail.LOW)
        self.prepared.get_nowait()
        return prepared


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_an_answer_that_is_streamed_holds_no_image(
    dialect: Dialect,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    budgets: list[Budget],
    traced: Callable[[], int],
) -> None:
    """Its bytes are in one file: neither they nor their base64 are in memory, or count there. The
    same image sent again and again takes no more, nor do others. Medians, because one turn may meet
    what Python allocates once, such as a larger table of its names.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = OneToken(card=SEEING)
    held, left = list[int](), list[int]()
    with running(engine, Settings(port=0)) as url:
        for turn in range(N_TURNS):
            gate = Gate()
            engine.script = Script(gate=gate, gate_after_tokens=0)
            with connected(url) as connection:
                connection.sendall(_request(dialect, turn // 2))
                engine.at_gate.get(timeout=WAIT_SECONDS)
                held.append(traced())
                assert sum(budget.total_bytes for budget in budgets) < HELD_BYTES
                assert not [*tmp_path.glob("rootstock/images/*/new-*")]
                gate.open()
                with connection.makefile("rb") as answer:
                    assert answer.readline().startswith(b"HTTP/1.1 200")
                    until(lambda: b"0\r\n" in answer.readline())
            until(lambda: sum(budget.total_bytes for budget in budgets) == 0)
            engine.submitted.get_nowait()
            left.append(traced())
    during = [now - before for before, now in zip(left, held[1:], strict=False)]
    assert median(during) < HELD_BYTES, (held, left)
    for turns in (left[::2], left[1::2]):
        assert median(now - before for before, now in pairwise(turns)) < LEFT_BYTES, (held, left)


def _request(dialect: Dialect, number: int) -> bytes:
    """A request for a stream about one of several images."""
    image = IMAGE + bytes([number]) * IMAGE_BYTES
    body = {**dialect.body(base64_of(image)), "stream": True}
    return request_head(json.dumps(body).encode(), path=dialect.path)

"""A connection between ranks: its frames, and how its end is noticed."""

import socket
import struct
import time
from collections.abc import Iterator
from queue import Queue
from threading import Event

import pytest

from engine.mlx_backend.ranks import link as links
from engine.mlx_backend.ranks.link import Link, RankLost, RankSilent
from engine.mlx_backend.ranks.plan import Frame
from engine.process.sockets import MAX_FRAME_BYTES, framed

BEAT = framed(bytes([Frame.BEAT]))


class End:
    """One end, whose other end is the test's."""

    def __init__(self) -> None:
        own, self.socket = socket.socketpair()
        self.lost = Queue[RankLost]()
        self._own = own
        self._is_lost = Event()
        self.link = Link(own, "rank 1", self._lose)

    def _lose(self, why: RankLost) -> None:
        self.lost.put(why)
        self._is_lost.set()

    def close(self) -> None:
        self.link.close()
        assert self._is_lost.wait(60)
        self._own.close()
        self.socket.close()

    def why(self) -> str:
        return str(self.lost.get(timeout=60))


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch) -> Iterator[End]:
    monkeypatch.setattr(links, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(links, "SILENT_SECONDS", 0.3)
    end = End()
    yield end
    end.close()


def test_frames(end: End) -> None:
    """Beats are not received, and a frame may come in parts."""
    data = BEAT + framed(bytes([Frame.SUBMIT]) + b"plan") + BEAT + framed(bytes([Frame.LAUNCH]))
    for byte in data:
        end.socket.send(bytes([byte]))
    assert end.link.receive() == bytes([Frame.SUBMIT]) + b"plan"
    assert end.link.receive_body(Frame.LAUNCH) == b""


def test_a_frame_of_another_kind(end: End) -> None:
    end.socket.send(framed(bytes([Frame.LAUNCH])))
    with pytest.raises(RankLost, match="a frame of kind 2 in place of FACTS"):
        end.link.receive_body(Frame.FACTS)


def test_it_says_that_it_runs(end: End) -> None:
    data = b""
    while len(data) < 3 * len(BEAT):
        data += end.socket.recv(100)
    assert data == BEAT * (len(data) // len(BEAT))


def test_the_other_end_is_closed(end: End) -> None:
    end.socket.close()
    assert end.why() == "rank 1 has ended"
    with pytest.raises(RankLost, match="rank 1 has ended"):
        end.link.receive()


def test_an_error_is_sent(end: End) -> None:
    end.socket.send(framed(bytes([Frame.FAILED]) + b"no memory"))
    assert end.why() == "rank 1: no memory"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (struct.pack("<I", MAX_FRAME_BYTES + 1), f"{MAX_FRAME_BYTES} are the most"),
        (b"GET / HTTP/1.1\r\n", "are the most"),
        (framed(b""), "an empty frame"),
    ],
)
def test_other_bytes(data: bytes, words: str, end: End) -> None:
    end.socket.send(data)
    assert words in end.why()


def test_a_truncated_frame(end: End) -> None:
    end.socket.send(framed(bytes([Frame.SUBMIT]) + b"plan")[:-1])
    end.socket.close()
    assert end.why() == "rank 1 has ended"


def test_a_silent_rank(end: End) -> None:
    """It is lost once it serves, even when it has been silent since before."""
    time.sleep(0.4)
    assert end.lost.empty()
    end.link.serve()
    assert end.why() == "rank 1 has been silent for 0.3 s"
    with pytest.raises(RankSilent):
        end.link.receive()


def test_a_rank_that_runs(end: End) -> None:
    end.link.serve()
    for _ in range(20):
        end.socket.send(BEAT)
        time.sleep(0.03)
    assert end.lost.empty()


def test_a_rank_that_takes_nothing(end: End) -> None:
    end.link.serve()
    plan = bytes(MAX_FRAME_BYTES - 1)  # more than buffers hold
    with pytest.raises(RankLost, match="rank 1 takes no frames"):
        end.link.send(Frame.SUBMIT, plan)


def test_sent_bytes(end: End) -> None:
    end.link.send(Frame.SUBMIT, b"plan")
    assert end.link.sent_bytes == len(framed(b".plan"))

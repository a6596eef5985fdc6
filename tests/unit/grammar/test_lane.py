"""One process as the engine thread talks to it."""

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from engine.grammar.remote.lane import READ_BYTES, Lane, LaneLost
from engine.grammar.remote.process import START_SECONDS, GrammarProcess
from engine.grammar.remote.wire import Mask, Message, Report, Said
from tests.unit.grammar.scripted import OUTSIDE, SECONDS, SameThread, Starts

JOB: Message = {"do": "open", "id": 1, "client": "a", "seconds": 0.2}


class Endless(socket.socket):
    """One that always has more to say, of a frame that has no end."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[int] = []

    def recv(self, size: int, flags: int = 0) -> bytes:
        self.received.append(size)
        assert len(self.received) < 100, "it is read without end"
        return struct.pack("<I", 60 << 20) if len(self.received) == 1 else bytes(1000)


@pytest.fixture
def starts() -> Iterator[Starts]:
    made = Starts()
    yield made
    made.close()


@pytest.fixture
def lane(starts: Starts) -> Lane:
    return Lane(starts, SameThread(), 0.2, lambda: 7.0)


def begun(lane: Lane) -> None:
    lane.post(JOB)
    lane.exchange()


def test_it_starts_with_the_first_post(lane: Lane, starts: Starts) -> None:
    assert lane.exchange() == []
    assert lane.connection is None
    begun(lane)
    assert starts.last.asked() == [JOB]


def test_what_it_says_comes_in_order(lane: Lane, starts: Starts) -> None:
    begun(lane)
    starts.last.begin(JOB)
    assert lane.exchange() == []
    starts.last.mask(1, 0, b"1234")
    starts.last.report(Said.STOPPED, id=1)
    assert lane.exchange() == [Mask(1, 0, 0.001, (), b"1234"), Report(Said.STOPPED, {"id": 1})]


def test_more_than_a_socket_takes_leaves_as_it_is_read(lane: Lane, starts: Starts) -> None:
    long = {**JOB, "text": "x" * 4_000_000}
    lane.post(long)
    lane.exchange()
    assert lane.is_held_up
    heard: list[Message] = []
    while not heard:
        heard = starts.last.asked()
        lane.exchange()
    assert heard == [long]
    assert not lane.is_held_up


def test_what_it_said_last_is_read_when_it_has_ended(lane: Lane, starts: Starts) -> None:
    begun(lane)
    starts.last.mask(1, 0, b"1234")
    starts.last.begin({**JOB, "id": 2})
    starts.last.die()
    lane.close(1)
    assert lane.exchange() == [Mask(1, 0, 0.001, (), b"1234")]
    with pytest.raises(LaneLost) as lost:
        lane.exchange()
    assert lost.value.culprit is not None
    assert lost.value.culprit.number == 2


def test_who_says_much_is_heard_a_bit_at_a_time(lane: Lane, starts: Starts) -> None:
    """Else one that never stops would have the engine thread for good."""
    begun(lane)
    endless = Endless()
    starts.last.connection.close()
    starts.last.connection = endless
    for n_calls in range(1, 6):
        assert lane.exchange() == []
        assert endless.received == n_calls * [READ_BYTES]


@pytest.mark.parametrize(
    "body", [b"", bytes([Said.BEGUN]) + b"{}", bytes([Said.BEGUN]) + b'{"id": []}', b"\x09{}"]
)
def test_what_makes_no_sense_loses_it_or_is_no_answer(
    lane: Lane, starts: Starts, body: bytes
) -> None:
    begun(lane)
    starts.last.peer.sendall(struct.pack("<I", len(body)) + body)
    with suppress(LaneLost):
        assert all(isinstance(one, Report) for one in lane.exchange())


def test_stopped_it_starts_again_with_the_next_post(lane: Lane, starts: Starts) -> None:
    begun(lane)
    assert lane.stop() == OUTSIDE
    assert lane.stop() is None
    begun(lane)
    assert len(starts.started) == 2


def test_who_cannot_be_started_is_lost(lane: Lane, starts: Starts) -> None:
    starts.is_possible = False
    lane.post(JOB)
    with pytest.raises(LaneLost, match="no more processes"):
        lane.exchange()
    assert lane.exchange() == []


def test_a_process_starts_on_another_thread_and_jobs_wait_for_it() -> None:
    may_start, starts, threads = threading.Event(), Starts(), list[int]()

    def start() -> GrammarProcess:
        threads.append(threading.get_ident())
        assert may_start.wait(SECONDS)
        return starts()

    with ThreadPoolExecutor(1) as starter:
        lane = Lane(start, starter, 0.2, lambda: 7.0)
        lane.post(JOB)
        lane.close(1)
        lane.post({**JOB, "id": 2})
        assert lane.exchange() == []
        assert (lane.connection, lane.is_held_up) == (None, True)
        may_start.set()
        starts.wait_for(0)
        while lane.is_held_up:
            lane.exchange()
        assert [job["id"] for job in starts.last.asked()] == [1, 1, 2]
        assert threads != [threading.get_ident()]
        lane.stop()


def test_a_process_that_starts_too_late_is_killed() -> None:
    may_start, starts = threading.Event(), Starts()

    def start() -> GrammarProcess:
        assert may_start.wait(SECONDS)
        return starts()

    with ThreadPoolExecutor(1) as starter:
        lane = Lane(start, starter, 0.2, lambda: 7.0)
        lane.post(JOB)
        lane.stop()
        may_start.set()
    assert all(process.is_over for process in starts.started)
    assert lane.exchange() == []


def test_a_start_that_hangs_is_given_up() -> None:
    may_start, clock = threading.Event(), [0.0]
    with ThreadPoolExecutor(1) as starter:
        lane = Lane(
            lambda: pytest.fail("it was given up") if may_start.wait(SECONDS) else Starts()(),
            starter,
            0.2,
            lambda: clock[0],
        )
        lane.post(JOB)
        clock[0] = START_SECONDS + 1
        with pytest.raises(LaneLost, match="does not start"):
            lane.exchange()
        may_start.set()

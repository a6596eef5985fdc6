"""The waiting queue against a model of it that has no data structure to speak of."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.queue import NoRoom, WaitingQueue
from engine.core.sequence import LiveSequence, Status
from engine.core.step import SequenceId
from engine.output.text import output_factory
from engine.values.request import Request
from engine.values.tokens import pack
from kvstore.tokens import Tokens
from kvstore.types import Namespace
from tests.simulation.daemon import LetterDetokenizer

PLACES = 12
NEW_OUTPUT = output_factory(frozenset(), lambda _: LetterDetokenizer())


def sequence(
    id: int, client: str, priority: int = 0, status: Status = Status.WAITING
) -> LiveSequence:
    request = Request(str(id), pack((1,)), 1, client=client, priority=priority)
    return LiveSequence(
        SequenceId(id),
        index=0,
        request=request,
        namespace=Namespace(model="", cache_salt=""),
        tokens=Tokens(request.prompt),
        output=NEW_OUTPUT(request),
        seed=0,
        status=status,
    )


def add(queue: WaitingQueue, added: LiveSequence) -> None:
    """Queue a sequence; one that was preempted has waited and run before."""
    if added.status is Status.PREEMPTED:
        added.status = Status.WAITING
        queue.add(added)
        queue.remove(added)
        added.status = Status.PREEMPTED
    queue.add(added)


def may_start(blocked: list[LiveSequence]) -> Callable[[LiveSequence], bool]:
    return lambda sequence: sequence not in blocked


class NaiveQueue:
    """Sequences, and the clients in the order of their turns; everything else is searched for."""

    def __init__(self) -> None:
        self.sequences: list[LiveSequence] = []

    def queue_of(self, client: str) -> list[LiveSequence]:
        own = [s for s in self.sequences if s.request.client == client]
        return sorted(own, key=lambda s: (s.request.priority, s.id))

    def in_turn(self, clients: list[str]) -> list[LiveSequence]:
        """One of each client, then the next of each."""
        queues = [self.queue_of(client) for client in clients]
        places = range(len(self.sequences))
        return [own[place] for place in places for own in queues if place < len(own)]

    def waiting(self, client: str | None = None) -> int:
        return sum(
            s.status is Status.WAITING and client in {None, s.request.client}
            for s in self.sequences
        )

    def has_room(self, client: str) -> bool:
        return self.waiting(client) < PLACES - self.waiting()


@settings(deadline=None)
@given(st.data())
def test_the_queue_does_what_the_naive_one_does(data: st.DataObject) -> None:
    queue, naive = WaitingQueue(PLACES), NaiveQueue()
    for id in range(data.draw(st.integers(1, 30), "steps")):
        client = data.draw(st.sampled_from("abc"), "client")
        status = data.draw(st.sampled_from([Status.WAITING] * 4 + [Status.PREEMPTED]), "status")
        if status is Status.PREEMPTED or naive.has_room(client):
            added = sequence(id, client, data.draw(st.integers(-1, 1), "priority"), status)
            add(queue, added)
            naive.sequences.append(added)
        if data.draw(st.booleans(), "one leaves") and naive.sequences:
            left = data.draw(st.sampled_from(naive.sequences), "who leaves")
            queue.remove(left)
            naive.sequences.remove(left)
            queue.end(left)
        blocked = [s for s in naive.sequences if data.draw(st.booleans(), "blocked")]
        for client in "abc":
            able = [s for s in naive.queue_of(client) if s not in blocked]
            assert queue.next(client, may_start(blocked)) is (able[0] if able else None)
            assert (client in queue) == bool(naive.queue_of(client))
        turns = data.draw(st.permutations("abc"), "turns")
        for client in turns:
            queue.mark_served(client)
        queue.begin_step()
        assert list(queue) == naive.in_turn(turns)
        assert len(queue) == len(naive.sequences)
        with pytest.raises(NoRoom, match=f"{naive.waiting()} sequences wait"):
            queue.check_room("a", PLACES + 1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 5))), st.integers(1, PLACES))
def test_there_is_room_while_a_client_has_no_more_waiting_than_places_are_free(
    adds: list[tuple[str, int]], places: int
) -> None:
    queue, own, ids = WaitingQueue(places), dict.fromkeys("abcd", 0), iter(range(1000))
    for client, n in adds:
        missing = own[client] + n - (places - sum(own.values()))
        if missing > 0:
            message = f"{sum(own.values())} sequences wait, {own[client]} of them"
            with pytest.raises(NoRoom, match=message) as refusal:
                queue.check_room(client, n)
            assert missing <= 2 * refusal.value.departures <= 2 * missing
            continue
        queue.check_room(client, n)
        own[client] += n
        for _ in range(n):
            queue.add(sequence(next(ids), client))
    assert len(queue) == sum(own.values()) <= places


@pytest.mark.parametrize(
    ("waiting", "n"), [("a" * 16, 8), ("a" * 12 + "b" * 6, 9), ("b" * 17, 21), ("abbbb" * 4, 16)]
)
def test_a_refusal_knows_how_many_must_leave(waiting: str, n: int) -> None:
    queue = WaitingQueue(36)
    for id, client in enumerate(waiting):
        queue.add(sequence(id, client))
    with pytest.raises(NoRoom) as refusal:
        queue.check_room("a", n)
    turns = list(queue)
    for departing in turns[: refusal.value.departures]:
        with pytest.raises(NoRoom):
            queue.check_room("a", n)
        queue.remove(departing)
    queue.check_room("a", n)


def test_who_does_not_wait_cannot_leave() -> None:
    queue = WaitingQueue(4)
    queue.add(sequence(1, "a"))
    with pytest.raises(ValueError, match="does not wait"):
        queue.remove(sequence(0, "a", status=Status.PREEMPTED))
    for stranger in (sequence(1, "a"), sequence(1, "b"), sequence(2, "a")):
        with pytest.raises(ValueError, match="does not wait"):
            queue.remove(stranger)


class CountedQueue(list[LiveSequence]):
    """A queue that notes who is looked at."""

    def __init__(self, sequences: list[LiveSequence], looks: list[LiveSequence]) -> None:
        super().__init__(sequences)
        self._looks = looks

    def __iter__(self) -> Iterator[LiveSequence]:
        for sequence in super().__iter__():
            self._looks.append(sequence)
            yield sequence


def test_to_find_who_is_next_nobody_behind_is_looked_at() -> None:
    queue = WaitingQueue(100)
    for id in range(49):
        queue.add(sequence(id, "a"))
    looks: list[LiveSequence] = []
    client = queue._clients["a"]
    client.waiting = CountedQueue(client.waiting, looks)
    queue.check_room("a", 1)
    assert len(queue) == 49
    assert not looks
    assert queue.next("a", lambda s: s.id >= 3) is looks[-1]
    assert [s.id for s in looks] == [0, 1, 2, 3]

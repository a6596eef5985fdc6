"""What a grammar process does, within the test's own process."""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from engine.grammar.remote.wire import (
    Ahead,
    Answered,
    Mask,
    Message,
    Report,
    Said,
    read_report,
    request_frame,
)
from engine.grammar.worker.service import TURN_SECONDS, Service
from engine.process.sockets import FrameBuffer
from tests.grammars import demo_tokenizer

END = 2


class Client:
    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._frames = FrameBuffer()
        self._heard: list[Answered | Report] = []
        self.begun: list[int] = []

    def post(self, *jobs: Message) -> None:
        self._peer.sendall(b"".join(map(request_frame, jobs)))

    def heard(self) -> Answered | Report:
        while not self._heard:
            bodies = self._frames.add(self._peer.recv(1 << 16))
            self._heard += map(read_report, bodies)
        return self._heard.pop(0)

    def answer(self) -> Answered | Report:
        while True:
            match self.heard():
                case Report(Said.BEGUN, fields):
                    self.begun.append(fields["id"])
                case answer:
                    return answer


def opening(number: int, text: str, client: str = "a", tokens: tuple[int, ...] = ()) -> Message:
    job = {"do": "open", "id": number, "client": client, "seconds": 60.0, "tokens": list(tokens)}
    return {**job, "kind": "regex", "text": text}


def stepping(number: int, *tokens: int) -> Message:
    job = {"do": "step", "id": number, "client": "a", "seconds": 60.0}
    return {**job, "tokens": list(tokens)}


def drafting(number: int, question: int, *tokens: int) -> Message:
    return {**stepping(number, *tokens), "do": "ahead", "question": question}


class TickingClock:
    """Between two looks at it two turns are over."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 2 * TURN_SECONDS
        return self._now


@pytest.fixture
def client() -> Iterator[Client]:
    with served(TickingClock()) as client:
        yield client


@pytest.fixture
def patient() -> Iterator[Client]:
    """Of a service for which no time passes."""
    with served(lambda: 0.0) as client:
        yield client


@contextmanager
def served(clock: Callable[[], float]) -> Iterator[Client]:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    service = Service(theirs, demo_tokenizer(END), clock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "setitimer", lambda which, seconds: None)  # it would end the tests
        thread = threading.Thread(target=service.run)
        thread.start()
        yield Client(ours)
        ours.close()
        thread.join(60)
        assert not thread.is_alive()  # it ends with the daemon's end of the socket
    theirs.close()


def allowed(mask: Answered | Report) -> set[int]:
    assert isinstance(mask, Mask)
    bits = int.from_bytes(mask.bits, "little")
    return {token for token in range(8 * len(mask.bits)) if bits >> token & 1}


def test_a_matcher_is_opened_told_and_complete(client: Client) -> None:
    tokenizer = demo_tokenizer(END)
    (a,) = tokenizer.tokenize_str("a")
    client.post(opening(1, "a[bc]"))
    assert a in allowed(client.answer())
    b, c = tokenizer.tokenize_str("b") + tokenizer.tokenize_str("c")
    client.post(stepping(1, a))
    assert allowed(client.answer()) == {b, c}
    client.post(stepping(1, b))
    last = client.answer()
    assert isinstance(last, Report)
    assert (last.said, last.fields["n_tokens"]) == (Said.STOPPED, 2)


def test_what_is_opened_with_tokens_is_what_was_told_them(client: Client) -> None:
    (a,) = demo_tokenizer(END).tokenize_str("a")
    client.post(opening(1, "(ab)*"), stepping(1, a), opening(2, "(ab)*", tokens=(a,)))
    client.answer()
    told, opened = client.answer(), client.answer()
    assert allowed(told) == allowed(opened)


def test_a_long_answer_that_is_told_again_lets_others_come_between(client: Client) -> None:
    (a,) = demo_tokenizer(END).tokenize_str("a")
    client.post(
        opening(1, "a{20}b", "a", tokens=(a,) * 19),
        stepping(1, a),
        opening(2, "a", "b"),
    )
    answers = [client.answer() for _ in range(3)]
    told = [(one.matcher, one.n_tokens) for one in answers if isinstance(one, Mask)]
    assert told == [(2, 0), (1, 19), (1, 20)]
    assert client.begun == [1, 2, *[1] * 19]  # a token each


def test_a_job_names_its_client_and_what_it_may_take(client: Client) -> None:
    client.post(opening(1, "a"))
    begun = client.heard()
    assert isinstance(begun, Report)
    assert {**begun.fields, "bytes_left": 0} == {
        "id": 1,
        "client": "a",
        "seconds": 60.0,
        "bytes_left": 0,
    }
    client.heard()


def test_a_token_that_the_grammar_forbids_is_an_error(client: Client) -> None:
    (b,) = demo_tokenizer(END).tokenize_str("b")
    client.post(opening(1, "a"), stepping(1, b))
    client.answer()
    failed = client.answer()
    assert isinstance(failed, Report)
    assert failed.said is Said.FAILED


def test_a_trial_says_what_is_wrong(client: Client) -> None:
    job = {"do": "try", "client": "", "seconds": 60.0, "kind": "regex"}
    client.post({**job, "text": "("}, {**job, "text": "\ud800"}, {**job, "text": "a"})
    for is_good in (False, False, True):
        verdict = client.heard()
        assert isinstance(verdict, Report)
        assert verdict.said is Said.VERDICT
        assert (verdict.fields["error"] is None) == is_good


def test_a_matcher_that_is_closed_is_let_go() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        service = Service(theirs, demo_tokenizer(END))
        for number in range(1000):
            service._take(opening(number, "a"))
            service._take({"do": "close", "id": number})
        assert not service._jobs
        service._take(opening(1, "a"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(signal, "setitimer", lambda which, seconds: None)
            service._do(service._jobs.take("a"))
        assert len(service._open) == 1
        service._take({"do": "close", "id": 1})
        assert not service._open


def test_a_draft_is_followed_and_the_matcher_is_as_before(patient: Client) -> None:
    tokenizer = demo_tokenizer(END)
    a, b, c = (tokenizer.tokenize_str(one)[0] for one in "abc")
    patient.post(opening(1, "a[bc]{2}"), drafting(1, 7, a, b, c, c), drafting(1, 8, a, a))
    before = patient.answer()
    assert patient.begun == [1]
    draft, wrong = patient.answer(), patient.answer()
    assert isinstance(draft, Ahead)
    assert isinstance(wrong, Ahead)
    assert (draft.question, draft.is_complete) == (7, True)
    patient.post(stepping(1, a), stepping(1, b))
    assert draft.bits == b"".join(told_mask(patient.answer()) for _ in range(2))
    assert (wrong.question, wrong.is_complete) == (8, False)
    assert wrong.bits == draft.bits[: len(wrong.bits)]
    patient.post(opening(2, "a[bc]{2}"))
    assert told_mask(patient.answer()) == told_mask(before)


def told_mask(answer: Answered | Report) -> bytes:
    assert isinstance(answer, Mask)
    return answer.bits


def test_a_draft_takes_no_longer_than_a_turn(client: Client) -> None:
    (a,) = demo_tokenizer(END).tokenize_str("a")
    client.post(opening(1, "a*"), drafting(1, 7, a, a))
    client.answer()
    draft = client.answer()
    assert isinstance(draft, Ahead)
    assert (draft.bits, draft.is_complete) == (b"", False)


def test_a_draft_of_a_grammar_that_could_not_be_opened_has_no_masks(patient: Client) -> None:
    patient.post(opening(1, "("), drafting(1, 7, 3))
    assert isinstance(patient.answer(), Report)
    draft = patient.answer()
    assert isinstance(draft, Ahead)
    assert draft.bits == b""


def test_what_must_follow_is_told_beside_the_mask(patient: Client) -> None:
    said = demo_tokenizer(END).tokenize_str("yes, of course")
    patient.post(opening(1, "yes, of course|no"))
    patient.post(stepping(1, said[0]), stepping(1, said[1]), stepping(1, *said[2:5]))
    for n_said in (0, 1, 2, 5):
        mask = patient.answer()
        assert isinstance(mask, Mask)
        assert mask.forced == (tuple(said[n_said:]) if n_said else ())

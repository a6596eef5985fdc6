"""What a grammar process does, within the test's own process."""

import mmap
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from llguidance import LLMatcher

from engine.grammar.wire import JobReport, ReportKind, WireMessage, read_report, request_frame
from engine.grammar.worker import (
    TURN_SECONDS,
    GrammarError,
    MemoryMeter,
    Worker,
    compile_grammar,
    probe,
)
from engine.process.sockets import FrameBuffer
from tests.grammars import demo_tokenizer

END = 2


class Client:
    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._frames = FrameBuffer()
        self._heard: list[JobReport] = []

    def post(self, *jobs: WireMessage) -> None:
        self._peer.sendall(b"".join(map(request_frame, jobs)))

    def answer(self) -> JobReport:
        while not self._heard:
            bodies = self._frames.add(self._peer.recv(1 << 16))
            self._heard += map(read_report, bodies)
        return self._heard.pop(0)


def opening(number: int, text: str, tokens: tuple[int, ...] = ()) -> WireMessage:
    return {**advancing(number, *tokens), "kind": "regex", "text": text}


def advancing(number: int, *tokens: int) -> WireMessage:
    return {"do": "advance", "id": number, "seconds": 60.0, "tokens": list(tokens), "draft": []}


def drafting(number: int, *draft: int) -> WireMessage:
    return {**advancing(number), "draft": list(draft)}


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
    """Of a worker for which no time passes."""
    with served(lambda: 0.0) as client:
        yield client


@contextmanager
def served(clock: Callable[[], float]) -> Iterator[Client]:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    worker = Worker(theirs, demo_tokenizer(END), clock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "setitimer", lambda which, seconds: None)  # it would end the tests
        thread = threading.Thread(target=worker.run)
        thread.start()
        client = Client(ours)
        assert client.answer().kind is ReportKind.READY
        yield client
        ours.close()
        thread.join(60)
        assert not thread.is_alive()  # it ends with the daemon's end of the socket
    theirs.close()


def allowed(report: JobReport) -> set[int]:
    assert report.kind is ReportKind.MASK
    bits = int.from_bytes(report.mask, "little")
    return {token for token in range(8 * len(report.mask)) if bits >> token & 1}


def test_a_matcher_is_opened_advanced_and_complete(client: Client) -> None:
    tokenizer = demo_tokenizer(END)
    (a,) = tokenizer.tokenize_str("a")
    client.post(opening(1, "a[bc]"))
    assert a in allowed(client.answer())
    b, c = tokenizer.tokenize_str("b") + tokenizer.tokenize_str("c")
    client.post(advancing(1, a))
    assert allowed(client.answer()) == {b, c}
    client.post(advancing(1, b))
    last = client.answer()
    assert (last.kind, last.number, last.n_tokens) == (ReportKind.COMPLETE, 1, 2)


def test_what_is_opened_with_tokens_is_what_was_given_them(client: Client) -> None:
    (a,) = demo_tokenizer(END).tokenize_str("a")
    client.post(opening(1, "(ab)*"), advancing(1, a), opening(2, "(ab)*", tokens=(a,)))
    client.answer()
    given, opened = client.answer(), client.answer()
    assert allowed(given) == allowed(opened)


def test_a_long_answer_that_is_made_again_takes_turns(client: Client) -> None:
    """Others come between: what is left of the tokens is asked for again."""
    (a,) = demo_tokenizer(END).tokenize_str("a")
    client.post(opening(1, "a{20}b", tokens=(a,) * 19))
    turn = client.answer()
    assert (turn.kind, turn.n_tokens) == (ReportKind.ADVANCED, 1)
    for n_tokens in range(2, 20):
        client.post(advancing(1, *(a,) * (20 - n_tokens)))
        turn = client.answer()
        assert turn.n_tokens == n_tokens
    assert turn.kind is ReportKind.MASK


def test_a_token_that_the_grammar_forbids_is_an_error(client: Client) -> None:
    (b,) = demo_tokenizer(END).tokenize_str("b")
    client.post(opening(1, "a"), advancing(1, b))
    client.answer()
    failed = client.answer()
    assert (failed.kind, bool(failed.error)) == (ReportKind.FAILED, True)


def test_a_trial_says_what_is_wrong(client: Client) -> None:
    job = {"do": "try", "id": 1, "seconds": 60.0, "kind": "regex"}
    client.post({**job, "text": "("}, {**job, "text": "\ud800"}, {**job, "text": "a"})
    for is_good in (False, False, True):
        verdict = client.answer()
        assert verdict.kind is ReportKind.VERDICT
        assert (verdict.error == "") == is_good


def test_a_grammar_is_compiled_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its trial. Matchers of it are copies."""
    compiled: list[str] = []

    def counted(tokenizer: object, kind: str, text: str) -> LLMatcher:
        compiled.append(text)
        return compile_grammar(demo_tokenizer(END), kind, text)

    monkeypatch.setattr("engine.grammar.worker.compile_grammar", counted)
    client.post({**opening(1, "ab"), "do": "try"}, opening(1, "ab"), opening(2, "ab"))
    for _ in range(3):
        client.answer()
    assert compiled == ["ab"]


def test_a_matcher_that_is_closed_is_forgotten() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "setitimer", lambda which, seconds: None)
        worker = Worker(theirs, demo_tokenizer(END))
        for number in range(20):
            worker._do(opening(number, "a"))
            worker._do({"do": "close", "id": number})
        assert not worker._open


def test_what_is_not_open_fails(client: Client) -> None:
    client.post(opening(1, "("), advancing(1, 3), drafting(1, 3))
    assert [client.answer().kind for _ in range(3)] == [ReportKind.FAILED] * 3


def test_a_draft_is_followed_and_the_matcher_is_as_before(patient: Client) -> None:
    tokenizer = demo_tokenizer(END)
    a, b, c = (tokenizer.tokenize_str(one)[0] for one in "abc")
    patient.post(opening(1, "a[bc]{2}"), drafting(1, a, b, c, c), drafting(1, a, a))
    before = patient.answer()
    draft, wrong = patient.answer(), patient.answer()
    assert (draft.kind, draft.mask, draft.is_draft_complete) == (ReportKind.ADVANCED, b"", True)
    patient.post(advancing(1, a), advancing(1, b))
    assert draft.draft_masks == b"".join(patient.answer().mask for _ in range(2))
    assert not wrong.is_draft_complete
    assert wrong.draft_masks == draft.draft_masks[: len(wrong.draft_masks)]
    patient.post(opening(2, "a[bc]{2}"))
    assert patient.answer().mask == before.mask


def test_tokens_and_a_draft_after_them_are_one_job(patient: Client) -> None:
    tokenizer = demo_tokenizer(END)
    a, b = (tokenizer.tokenize_str(one)[0] for one in "ab")
    patient.post(opening(1, "abab"), {**advancing(1, a), "draft": [b]}, advancing(1, b))
    _, both, after = (patient.answer() for _ in range(3))
    assert allowed(both) == {b}
    assert both.draft_masks == after.mask


def test_a_draft_takes_no_longer_than_a_turn(client: Client) -> None:
    (a,) = demo_tokenizer(END).tokenize_str("a")
    client.post(opening(1, "a*"), drafting(1, a, a))
    client.answer()
    draft = client.answer()
    assert (draft.draft_masks, draft.is_draft_complete) == (b"", False)


def test_what_must_follow_is_reported_beside_the_mask(patient: Client) -> None:
    said = demo_tokenizer(END).tokenize_str("yes, of course")
    patient.post(opening(1, "yes, of course|no"))
    patient.post(advancing(1, said[0]), advancing(1, said[1]), advancing(1, *said[2:5]))
    for n_said in (0, 1, 2, 5):
        assert patient.answer().forced == (tuple(said[n_said:]) if n_said else ())


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that says what is taken")
def test_memory_that_is_taken_is_not_left() -> None:
    meter = MemoryMeter()
    before = meter.bytes_left()
    # New to the process: an allocator might give what it has had before.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        assert before - meter.bytes_left() >= len(taken)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"$ref": "#"}', "no text matches it"),
        ("lark", "start: start", "no text matches it"),
        ("json_schema", '{"oneOf": [{}, {}]}', "oneOf constraints are not supported"),
        (
            "regex",
            "(?=a)b",
            'at 1(8): invalid regex "(?=a)b" (in regex): regex parse error: look-around, including '
            "look-ahead and look-behind, is not supported",
        ),
        ("json_schema", '{"pattern": "("}', "regex parse error: unclosed group"),
    ],
)
def test_a_refusal_names_what_is_wrong(kind: str, text: str, reason: str) -> None:
    with pytest.raises(GrammarError) as refused:
        probe(compile_grammar(demo_tokenizer(END), kind, text))
    assert str(refused.value) == reason

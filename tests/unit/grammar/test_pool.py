"""Which worker does what, and when, and what the pool costs those who do not need it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.grammar.pool import (
    IDLE_SECONDS,
    RETRY_SECONDS,
    START_SECONDS,
    TICK_SECONDS,
)
from engine.grammar.queue import (
    HOPEFUL_CHARACTERS,
    PIPELINED_JOBS,
    SHORT_LIMIT_SECONDS,
    SHORT_SECONDS,
    USAGE_SECONDS,
    ProcessorUsage,
    Session,
    patience_seconds,
)
from engine.grammar.state import Allowed, Unanswerable
from engine.grammar.wire import WireMessage
from engine.values.request import Grammar, GrammarKind
from tests.unit.grammar.scripted import SECONDS, SameThread, Scene, matcher

LONG = 2.0
"""A trial's seconds, of a grammar that is not short."""


def try_grammar(scene: Scene, client: str, text: str) -> None:
    def done(outcome: object, draft: object) -> None: ...

    grammar = Grammar(GrammarKind.REGEX, text)
    scene.pool.submit(Session(client, grammar, done, is_trial=True))
    scene.turn()


def test_without_grammars_nothing_starts(scene: Scene) -> None:
    scene.answers.wait(lambda: True, 0.0)
    scene.pool.close()
    assert scene.threads == []
    assert scene.starts.threads == []


def test_what_is_known_to_be_short_goes_to_the_first_worker(scene: Scene) -> None:
    scene.ask(0, "a", matcher(SHORT_SECONDS))
    scene.ask(1, "b", matcher(LONG))
    seconds = [scene.requests(process)[0]["seconds"] for process in (0, 1)]
    assert min(seconds) == pytest.approx(SHORT_LIMIT_SECONDS + 2 * SHORT_SECONDS)
    assert max(seconds) > 2 * LONG


def test_a_small_grammar_is_tried_while_two_costly_ones_are_compiled(scene: Scene) -> None:
    """By the first worker, which gives it little time."""
    for client in "ab":
        try_grammar(scene, client, client)
    try_grammar(scene, "c", "x" * (HOPEFUL_CHARACTERS + 1))
    assert len(scene.starts.started) == 2
    try_grammar(scene, "d", "small")
    (job,) = scene.requests(2)
    assert (job["text"], job["seconds"]) == ("small", SHORT_LIMIT_SECONDS)


def test_a_client_whose_jobs_take_long_is_kept_out_of_the_first_worker(scene: Scene) -> None:
    try_grammar(scene, "a", "x")
    (job,) = scene.requests(0)
    scene.verdict(0, job, seconds=SHORT_SECONDS + 0.01)
    for client in "bc":
        try_grammar(scene, client, client)
    try_grammar(scene, "a", "small")
    assert len(scene.starts.started) == 2
    scene.now = USAGE_SECONDS + 1
    scene.turn()
    assert [job["text"] for job in scene.requests(2)] == ["small"]


def test_a_short_matcher_that_a_long_job_keeps_waiting_moves_to_the_first_worker(
    scene: Scene,
) -> None:
    for client in "ab":
        try_grammar(scene, client, client)
    for process in (0, 1):
        (job,) = scene.requests(process)
        scene.verdict(process, job)
    one = matcher(text="a")
    opened = scene.opened(one)
    scene.process(0).mask(opened, 0)
    for client in "cd":
        try_grammar(scene, client, client)
    one.accept(1)
    scene.ask(0, "a", one)
    assert len(scene.starts.started) == 2, "the trial may be over soon"
    scene.now = SHORT_SECONDS + 0.01
    scene.turn()
    (moved,) = scene.requests(2)
    assert (moved["text"], moved["tokens"]) == ("a", [1])
    assert [job["do"] for job in scene.requests(0)] == ["try", "close"]
    scene.mask(2, moved, 1)
    assert isinstance(one.answer, Allowed)


def test_what_was_sent_after_a_job_that_turns_out_long_is_done_by_the_first_worker(
    scene: Scene,
) -> None:
    try_grammar(scene, "a", "x")
    scene.verdict(0, scene.job(0))
    slow, quick = matcher(text="x"), matcher(text="x", tokens=(3,))
    scene.ask(0, "b", slow)
    scene.ask(1, "c", quick)
    first, second = scene.requests(0)
    scene.now = SHORT_SECONDS + 0.01
    scene.turn()
    (again,) = scene.requests(1)
    assert again["tokens"] == [3]
    scene.process(0).mask(first, 0, SHORT_SECONDS + 0.01)
    scene.process(0).mask(second, 1)  # it is done there all the same, and counts for nothing
    scene.turn()
    assert quick.answer is None
    scene.mask(1, again, 1)
    assert isinstance(slow.answer, Allowed)
    assert isinstance(quick.answer, Allowed)


@pytest.mark.parametrize("charged", ["seconds", "draft_seconds"])
def test_who_has_used_least_is_next(scene: Scene, charged: str) -> None:
    for number, (client, seconds) in enumerate([("a", 0.04), ("b", 0.01)]):
        one = matcher()
        scene.ask(number, client, one)
        (job,) = scene.requests(0)
        scene.mask(0, job, 0, **{charged: seconds})
    for number, client in enumerate("aabbcc"):
        scene.ask(10 + number, client, matcher(text=f"{client}{number}"))
    assert [job["text"] for job in scene.requests(0)] == ["c4", "c5", "b2", "b3", "a0", "a1"]


def test_a_worker_has_few_jobs_at_a_time(scene: Scene) -> None:
    """So that who comes later and has used less need not wait for all of them."""
    for number in range(PIPELINED_JOBS + 1):
        scene.ask(number, "a", matcher())
    jobs = scene.requests(0)
    assert len(jobs) == PIPELINED_JOBS
    scene.ask(99, "b", matcher())
    scene.process(0).mask(jobs[0], 0)
    (late,) = scene.requests(0)
    assert late["id"] == PIPELINED_JOBS + 2


def test_a_trial_that_is_next_gets_a_worker_that_has_always_more_to_do(scene: Scene) -> None:
    """No more short jobs are sent there until it is free for the trial."""
    texts = {0: "a", 1: "b"}
    for text in texts.values():
        try_grammar(scene, text, text)
    for process in texts:
        scene.verdict(process, scene.job(process))
    running = {}
    for process, text in texts.items():
        scene.ask(process, "busy", matcher(text=text))
        (running[process],) = scene.requests(process)
    scene.mask(0, running[0], 0, 0.01)
    scene.ask(2, "busy", matcher(text="a"))
    (more,) = scene.requests(0)
    try_grammar(scene, "new", "x" * (HOPEFUL_CHARACTERS + 1))
    scene.ask(3, "busy", matcher(text="a"))
    assert scene.requests(0) == []
    scene.process(0).mask(more, 0)
    (next_job,) = scene.requests(0)
    assert next_job["do"] == "try"


def test_seconds_count_for_a_minute() -> None:
    usage = ProcessorUsage()
    usage.add("a", 1.0, 0.0)
    usage.add("a", 0.5, 30.0)
    assert usage.seconds("a", 59.0) == 1.5
    assert usage.seconds("a", 75.0) == 0.5
    assert usage.seconds("a", 200.0) == 0.0
    assert not usage._totals


def test_a_worker_without_matchers_ends_unless_it_is_the_last(scene: Scene) -> None:
    scene.ask(0, "a", matcher())
    scene.ask(1, "b", matcher(LONG))
    for process in (0, 1):
        scene.mask(process, scene.job(process), 0)
    scene.now = IDLE_SECONDS + 1
    scene.turn()
    assert not any(process.is_over for process in scene.starts.started)
    scene.end()
    scene.turn()
    assert sum(process.is_over for process in scene.starts.started) == 1


def test_a_process_starts_on_another_thread_and_jobs_wait_for_it() -> None:
    with ThreadPoolExecutor(1) as starter:
        scene = Scene(starter)
        scene.starts.may_start.clear()
        one = matcher()
        scene.ask(0, "a", one)
        scene.turn()
        assert scene.starts.started == []
        scene.starts.may_start.set()
        while not scene.starts.started:
            scene.turn()
        while not (jobs := scene.requests(0)):
            pass
        scene.mask(0, jobs[0], 0)
        assert isinstance(one.answer, Allowed)
        assert threading.get_ident() not in scene.starts.threads
        scene.close()


def test_a_process_whose_start_hangs_is_given_up_and_killed_later() -> None:
    with ThreadPoolExecutor(1) as starter:
        scene = Scene(starter)
        scene.starts.may_start.clear()
        scene.ask(0, "a", matcher())
        scene.turn()
        scene.now = START_SECONDS + 1
        scene.turn()
        scene.pool.close()
        scene.starts.may_start.set()
        scene.close()
    assert all(process.is_over for process in scene.starts.started)


def test_a_kernel_without_buffers_does_not_make_the_pool_spin(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BSD kernels answer ENOBUFS, and call the socket writable all the same."""
    scene.ask(0, "a", matcher())
    scene.turn()
    assert (scene.pool._rest_seconds() or 0.0) > TICK_SECONDS
    monkeypatch.setattr("engine.grammar.process.send_some", lambda connection, data: 0)
    scene.ask(1, "a", matcher())
    scene.turn()
    assert scene.pool._rest_seconds() == RETRY_SECONDS


def test_the_pool_sleeps_while_no_job_runs(scene: Scene) -> None:
    """Matchers may be open: their sequences may wait for blocks, or for a client."""
    ones = {0: matcher(text="short"), 1: matcher(LONG, text="long")}
    for process, one in ones.items():
        opened = scene.opened(one, sequence=process, process=process)
        assert scene.pool._rest_seconds() is not None
        scene.mask(process, opened, 0)
        assert scene.pool._rest_seconds() is None, "no worker is spare"
    scene.end()
    assert scene.pool._rest_seconds() == IDLE_SECONDS
    scene.now = IDLE_SECONDS + 1
    scene.turn()
    assert scene.pool._rest_seconds() is None, "the last worker stays"


def test_a_job_that_runs_is_looked_at_when_it_may_hold_up_others_and_when_it_is_stuck(
    scene: Scene,
) -> None:
    scene.ask(0, "a", matcher(LONG))
    limit = scene.job(0)["seconds"]
    for due in (SHORT_SECONDS, SHORT_LIMIT_SECONDS, patience_seconds(limit)):
        assert scene.pool._rest_seconds() == pytest.approx(due - scene.now)
        scene.now = due + 0.001
        scene.turn()


@pytest.mark.parametrize("ends", ["by itself", "because it is stuck"])
def test_a_job_is_sent_while_the_memory_of_a_killed_worker_is_freed(ends: str) -> None:
    """The engine's thread sends it. To end a process of 900 MiB takes 56 ms on two CPU cores."""
    with ThreadPoolExecutor(1) as starter:
        scene = Scene(starter)
        scene.ask(0, "a", matcher(LONG))
        while not scene.starts.started:
            scene.turn()
        while not scene.requests(0):
            pass
        ended = scene.process(0)
        ended.may_end.clear()
        if ends == "by itself":
            ended.die()
        else:
            scene.now = 10 * patience_seconds(LONG)
        scene.ask(1, "b", matcher())
        turning = threading.Thread(target=scene.pool.turn, args=[0.0])
        turning.start()
        assert ended.is_awaited.wait(SECONDS)
        sending = threading.Thread(target=scene.pool.flush)
        sending.start()
        sending.join(SECONDS / 2)
        was_sent = not sending.is_alive()
        ended.may_end.set()
        turning.join(SECONDS)
        sending.join(SECONDS)
        assert was_sent
        scene.close()


@pytest.mark.parametrize("method", ["_exchange", "_take_started", "_look_at", "_dispatch"])
def test_after_its_thread_has_died_the_next_grammar_is_answered(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread and new processes. Who waits then gets no answer."""
    scene = Scene()
    lost, one = matcher(), matcher()
    scene.ask(0, "a", lost)
    scene.answers.wait(lambda: True, 0.0)

    def fails(*arguments: object) -> None:
        raise RuntimeError("a fault of the pool")

    with monkeypatch.context() as patch:
        patch.setattr(scene.pool, method, fails)
        scene.threads[0]()
    scene.answers.wait(lambda: lost.answer is not None, 0.0)
    assert isinstance(lost.answer, Unanswerable)
    scene.ask(1, "a", one)
    assert len(scene.threads) == 2
    scene.turn()
    last = len(scene.starts.started) - 1
    scene.mask(last, scene.job(last), 0)
    assert isinstance(one.answer, Allowed)
    assert all(process.is_over for process in scene.starts.started[:last])
    scene.close()


def test_more_than_a_socket_takes_leaves_as_it_is_read(scene: Scene) -> None:
    scene.ask(0, "a", matcher(text="x" * 4_000_000))
    heard = list[WireMessage]()
    while not heard:
        heard = scene.requests(0)
    assert len(heard[0]["text"]) == 4_000_000


def test_on_its_own_thread_it_answers_and_ends() -> None:
    scene = Scene(SameThread())
    one = matcher()
    scene.ask(0, "a", one)
    scene.answers.wait(lambda: True, 0.0)
    (run,) = scene.threads
    thread = threading.Thread(target=run)
    thread.start()
    scene.answers._clock = time.monotonic
    jobs = list[WireMessage]()
    while not jobs:
        jobs = scene.starts.started[0].requests() if scene.starts.started else []
    scene.process(0).mask(jobs[0], 0)
    scene.answers.wait(lambda: one.answer is not None, SECONDS)
    assert isinstance(one.answer, Allowed)
    scene.pool.close()
    thread.join(SECONDS)
    assert not thread.is_alive()
    scene.threads.clear()
    scene.close()

"""Runs batches: a batch of each client at a time, many of its lines at once, all of them requests
of the lowest priority.

The results are lines that are appended to files. A daemon that starts reads them, and goes on with
the lines that have none.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, TypeVar

import jiter
from anyio import (
    CancelScope,
    CapacityLimiter,
    Event,
    create_task_group,
    current_time,
    sleep,
    to_thread,
)
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from fastapi import Depends, Request

from server.batches.answer import KeyGone, LineAnswer, LineAnswerer, answered_line, unanswered_line
from server.batches.lines import (
    Line,
    LineBody,
    WrongLines,
    add_usage,
    outcome_of,
    read_lines,
    read_results,
    request_body,
)
from server.batches.store import BatchStore, LineError, Part, Purpose, StoredBatch, StoreFull
from server.errors import UNSUPPORTED, ApiError, invalid
from server.fairness import FairLimiter
from server.record import Principal

THREADS = 4
DISK_RETRY_SECONDS = 5.0  # after an error of the disk, or while the store is full
ERROR_RETRY_SECONDS = 60.0  # after an error that nothing explains
SAVE_SECONDS = 1.0  # between two records of how far a batch is
KEEP_SECONDS = 30 * 24 * 3600  # batches after their end
EXPIRE_SECONDS = 60.0  # between two looks for what has expired

OUTCOMES = ("completed", "failed", "expired", "cancelled")

T = TypeVar("T")

log = logging.getLogger("rootstock.batches")


class _Run:
    """A batch that runs. `done` are the ids of the lines that have results."""

    def __init__(self, batch: StoredBatch, principal: Principal) -> None:
        self.batch = batch
        self.principal = principal
        self.scope = CancelScope()
        self.lines: list[Line] = []
        self.done = set[str]()
        self.output: Part | None = None
        self.errors: Part | None = None
        self.saved_at = 0.0  # of the monotonic clock


class BatchRunner:
    """The batches of a daemon. Belongs to one event loop; `counts` is for metrics."""

    def __init__(
        self, store: BatchStore, answerer: LineAnswerer, lines_at_once: int, max_line_bytes: int
    ) -> None:
        self.store = store
        self.counts = Counter(
            dict.fromkeys(OUTCOMES, 0)
        )  # lines by what came of them, since the start
        self.retry_seconds = DISK_RETRY_SECONDS
        self._answerer = answerer
        self._max_line_bytes = max_line_bytes
        self._slots = FairLimiter(lines_at_once, lines_at_once)
        self._threads = CapacityLimiter(THREADS)
        self._running: dict[str, _Run] = {}
        self._begun = set[str]()  # batches that have a task
        self._clients = set[str]()  # that have a task
        self._tasks: TaskGroup | None = None

    async def run(self, draining: Event) -> None:
        """Run what has not ended, and what is added, until the daemon drains its models. Lines that
        run then are run again after the next start.
        """
        async with create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._expire_files)
            self.wake()
            await draining.wait()
            self._tasks = None
            tasks.cancel_scope.cancel()

    async def on_disk(self, function: Callable[[], T]) -> T:
        """Call a function that waits for the disk. Raises ApiError (507) where that is full, or
        fails.
        """
        try:
            return await to_thread.run_sync(function, limiter=self._threads)
        except OSError as error:
            log.error("the store of batches cannot be used: %s", error)
            raise StoreFull(f"The store of files and batches fails: {error.strerror}.") from None

    def wake(self) -> None:
        """Run the batches of the store that do not run."""
        if self._tasks is None:
            return
        for batch in self.store.live_batches():
            if batch.client not in self._clients:
                self._clients.add(batch.client)
                self._tasks.start_soon(self._run_client, batch.client)

    async def cancel(self, batch: StoredBatch) -> None:
        """End a batch that has not ended. What it has so far is kept."""
        if batch.is_live and batch.cancelling_at is None:
            batch.status, batch.cancelling_at = "cancelling", _now()
            await self.on_disk(partial(self.store.save, batch))
            if (run := self._running.get(batch.id)) is not None:
                run.scope.cancel()
            elif batch.id not in self._begun and self._tasks is not None:
                self._tasks.start_soon(self._run_batch, batch)

    async def _expire_files(self) -> None:
        while True:
            with suppress(ApiError):  # it is logged
                await self.on_disk(partial(self.store.expire, KEEP_SECONDS))
            await sleep(EXPIRE_SECONDS)

    async def _run_client(self, client: str) -> None:
        """Run the client's batches, one after the other, the oldest first. Raises nothing: it would
        end all tasks of the group.
        """
        try:
            while True:
                live = [each for each in self.store.live_batches() if each.client == client]
                waiting = [each for each in live if each.id not in self._begun]
                if not waiting:
                    return
                await self._run_batch(waiting[0])
        finally:
            self._clients.discard(client)

    async def _run_batch(self, batch: StoredBatch) -> None:
        """Run a batch to its end, through errors of the disk and others: its results are not lost,
        and its time is limited.
        """
        self._begun.add(batch.id)
        try:
            while batch.is_live:
                try:
                    await self._run_once(batch)
                except ApiError as error:  # of the disk, or the store is full
                    log.error("%s waits: %s", batch.id, error)
                    await sleep(self.retry_seconds)
                except Exception:
                    log.exception("%s waits", batch.id)
                    await sleep(ERROR_RETRY_SECONDS)
        finally:
            self._begun.discard(batch.id)

    async def _run_once(self, batch: StoredBatch) -> None:
        try:
            run = _Run(batch, self._answerer.principal(batch))
        except KeyGone:
            message = "The API key of this batch is no longer known."
            await self._fail(
                batch, [LineError(code="invalid_api_key", message=message, line=None, param=None)]
            )
            return
        try:
            await self.on_disk(partial(self._begin, run))
        except WrongLines as wrong:
            await self._fail(batch, wrong.errors)
            return
        self._running[batch.id] = run
        try:
            if batch.cancelling_at is None:
                left_seconds = max(batch.expires_at - time.time(), 0.0)
                run.scope.deadline = current_time() + left_seconds
                with run.scope:
                    await self._run_lines(run)
            await self.on_disk(partial(self._end, run))
        finally:
            del self._running[batch.id]
        log.info(
            "%s is %s: %d of %d lines answered, %d with an error",
            *(batch.id, batch.status, batch.completed + batch.failed, batch.total, batch.failed),
        )

    async def _fail(self, batch: StoredBatch, errors: Sequence[LineError]) -> None:
        batch.status, batch.failed_at, batch.errors = "failed", _now(), list(errors)
        await self.on_disk(partial(self.store.save, batch))

    def _begin(self, run: _Run) -> None:
        """Read the input and the results that are there."""
        batch, store = run.batch, self.store
        source = store.file(batch.owner, batch.input_file_id)
        if source is None:
            message = f"The file {batch.input_file_id} is gone."
            raise WrongLines([LineError(code="file_gone", message=message, line=None, param=None)])
        run.lines, model = read_lines(store.path(source), batch.endpoint, self._max_line_bytes)
        batch.total, batch.model = len(run.lines), model
        batch.completed = batch.failed = 0
        batch.usage = type(batch.usage)()
        run.output = self._open(run, batch.output_part_id)
        run.errors = self._open(run, batch.error_part_id)
        if batch.cancelling_at is None:
            batch.status = "in_progress"
            batch.in_progress_at = batch.in_progress_at or _now()
        store.save(batch)

    def _open(self, run: _Run, id: str) -> Part | None:
        """A file of results, to be written on after its last whole line. None if it is finished."""
        batch, store = run.batch, self.store
        file = store.file(batch.owner, id)
        if file is not None:  # the process ended before it recorded the end of the batch
            for result in read_results(store.path(file)):
                self._note(run, result.custom_id, result.value)
            return None
        part, end = store.part(id, batch.owner, batch.client), 0
        for result in read_results(part.path):
            end = result.end
            self._note(run, result.custom_id, result.value)
        part.truncate(end)
        return part

    def _note(self, run: _Run, custom_id: str, value: Mapping[str, Any]) -> None:
        """Count a line of results."""
        if custom_id in run.done:
            return
        run.done.add(custom_id)
        outcome = outcome_of(value)
        if outcome == "completed":
            run.batch.completed += 1
            add_usage(run.batch.usage, value)
        elif outcome == "failed":
            run.batch.failed += 1

    async def _run_lines(self, run: _Run) -> None:
        """Answer all lines that have no result yet."""
        client = run.principal.client
        async with create_task_group() as tasks:
            for line in run.lines:
                if line.custom_id not in run.done:
                    await checkpoint()
                    await self._slots.acquire(client, line.n_bytes)
                    tasks.start_soon(self._run_line, run, line)

    async def _run_line(self, run: _Run, line: Line) -> None:
        batch = run.batch
        try:
            body = await self._lasting(partial(self._read, run, line))
            while True:
                answer = await self._answerer.answer(batch, run.principal, body)
                if answer.retry_seconds is None:
                    break
                await sleep(answer.retry_seconds)
            goes_apart = answer.status != 200 and not batch.is_of_messages
            part = run.errors if goes_apart else run.output
            assert part is not None, "a file of results is finished after the last line"
            await self._lasting(partial(self._append, run, part, line.custom_id, answer))
            self.counts["completed" if answer.status == 200 else "failed"] += 1
        finally:
            self._slots.release(run.principal.client)

    async def _lasting(self, function: Callable[[], T]) -> T:
        """Call a function of the disk until the disk lets it succeed."""
        while True:
            try:
                with CancelScope(shield=True):  # a line that is written is counted, too
                    return await self.on_disk(function)
            except ApiError as error:
                log.error("a line of a batch waits: %s", error)
                await sleep(self.retry_seconds)

    def _read(self, run: _Run, line: Line) -> LineBody:
        source = self.store.file(run.batch.owner, run.batch.input_file_id)
        if source is None:  # it is not dropped while its batch is live
            raise OSError("the input of a batch is gone")
        with self.store.path(source).open("rb") as file:
            file.seek(line.start)
            return request_body(file.read(line.n_bytes))

    def _append(self, run: _Run, part: Part, custom_id: str, answer: LineAnswer) -> None:
        """Write a line of results and count it."""
        result = answered_line(run.batch, custom_id, answer)
        with self.store.lock:
            part.append(result)
            self._note(run, custom_id, jiter.from_json(result))
            if time.monotonic() - run.saved_at > SAVE_SECONDS:
                run.saved_at = time.monotonic()
                try:
                    self.store.save(run.batch)
                except OSError as error:  # the lines say the same
                    log.error("how far %s is cannot be saved: %s", run.batch.id, error)

    def _end(self, run: _Run) -> None:
        """Write the results of the lines that were not answered, and finish the files."""
        batch, store = run.batch, self.store
        reason = None if batch.completed + batch.failed == batch.total else "expired"
        if batch.cancelling_at is not None:
            reason = "cancelled"
        if reason is not None:
            self._end_unanswered(run, reason)
        if batch.cancelling_at is None:
            batch.status = "finalizing"
        batch.finalizing_at = now = _now()
        for part in (run.output, run.errors):
            if part is not None and not part.n_bytes:
                part.discard()
            elif part is not None:
                kind: Purpose = "messages_output" if batch.is_of_messages else "batch_output"
                name = f"{batch.id}_{'error' if part is run.errors else 'output'}.jsonl"
                part.finish(name, kind, now, batch.output_seconds)
        ids = (batch.output_part_id, batch.error_part_id)
        batch.output_file_id, batch.error_file_id = [
            id if store.file(batch.owner, id) is not None else None for id in ids
        ]
        if reason == "cancelled":
            batch.status, batch.cancelled_at = "cancelled", now
        elif reason == "expired":
            batch.status, batch.expired_at = "expired", now
        else:
            batch.status, batch.completed_at = "completed", now
        store.save(batch)

    def _end_unanswered(self, run: _Run, reason: str) -> None:
        """Write the results of the lines that were not answered, as far as there is room."""
        batch = run.batch
        part = run.output if batch.is_of_messages else run.errors
        if part is None:  # the process ended after it had written them
            return
        for line in run.lines:
            if line.custom_id in run.done:
                continue
            try:
                part.append(unanswered_line(batch, line.custom_id, reason))
            except StoreFull as full:
                log.error("lines of %s that were not answered have no result: %s", batch.id, full)
                return
            run.done.add(line.custom_id)
            self.counts[reason] += 1


def _now() -> int:
    return int(time.time())


async def _batches(request: Request) -> BatchRunner:
    """Raises ApiError (400) where there are none."""
    runner: BatchRunner | None = request.app.state.batches
    if runner is None:
        message = "This daemon keeps no files and no batches: start it with --batches FOLDER."
        raise invalid(message, None, UNSUPPORTED)
    return runner


BatchesDependency = Annotated[BatchRunner, Depends(_batches)]

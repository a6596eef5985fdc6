"""`/v1/messages/batches`: batches of Messages requests, as Anthropic has them."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from fastapi import Query
from pydantic import BaseModel, Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from server.batches.runner import BatchesDependency, BatchRunner
from server.batches.store import MESSAGES_ENDPOINT, StoredBatch, new_file_id
from server.dialects.endpoint import Endpoints
from server.errors import ApiError, InvalidField
from server.json_model import RequestModel
from server.record import RequestRecord
from server.service import Context, RecordDependency

JSON_LINES = "application/x-jsonl"
MAX_REQUESTS = 10_000
WINDOW_SECONDS = 24 * 3600
RESULTS_SECONDS = 29 * 24 * 3600


class BatchedMessage(RequestModel):
    """One request of a batch. What is wrong with its `params` is its result."""

    custom_id: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    params: dict[str, Any]


class MessageBatchRequest(RequestModel):
    """A batch of requests."""

    EXAMPLE: ClassVar = {
        "requests": [
            {
                "custom_id": "first",
                "params": {
                    "max_tokens": 100,
                    "messages": [{"role": "user", "content": "What is a radix tree?"}],
                },
            }
        ]
    }

    requests: list[BatchedMessage] = Field(min_length=1, max_length=MAX_REQUESTS, fail_fast=True)


class MessageBatchCounts(BaseModel):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatchBody(BaseModel):
    """A batch, as Anthropic describes it."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    ended_at: str | None
    created_at: str
    expires_at: str
    archived_at: str | None
    cancel_initiated_at: str | None
    results_url: str | None


class MessageBatchPage(BaseModel):
    data: list[MessageBatchBody]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(BaseModel):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


router = Endpoints(prefix="/v1/messages/batches")


@router.endpoint("POST", "", body=MessageBatchRequest, errors=(429, 507))
async def create_message_batch(context: Context, batches: BatchesDependency) -> MessageBatchBody:
    """Has the requests answered, in steps that nothing else needs."""
    record, now = context.record, int(time.time())
    n_requests, text = await context.read_as(MessageBatchRequest, _input_lines)
    batch = StoredBatch(
        id=f"msgbatch_{uuid4().hex}",
        owner=record.key,
        client=record.client,
        created_at=now,
        endpoint=MESSAGES_ENDPOINT,
        input_file_id=new_file_id(),
        expires_at=now + WINDOW_SECONDS,
        window="24h",
        output_seconds=RESULTS_SECONDS,
        total=n_requests,
    )
    await batches.on_disk(partial(_add, batches, batch, text))
    batches.wake()
    return _body(context.http, batches, batch)


def _input_lines(body: MessageBatchRequest) -> tuple[int, bytes]:
    """The number of requests, and the lines of the batch's input. Raises ApiError (400)."""
    lines, known = list[bytes](), set[str]()
    for at, request in enumerate(body.requests):
        if request.custom_id in known:
            raise InvalidField(f"requests[{at}].custom_id", "another request has the same")
        known.add(request.custom_id)
        fields = {"method": "POST", "url": MESSAGES_ENDPOINT, "body": request.params}
        lines.append(to_json({"custom_id": request.custom_id, **fields}))
    return len(lines), b"\n".join([*lines, b""])


def _add(batches: BatchRunner, batch: StoredBatch, text: bytes) -> None:
    """Keep a batch and its input. Raises ApiError (429, 507) and OSError."""
    store = batches.store
    part = store.part(batch.input_file_id, batch.owner, batch.client)
    try:
        part.append(text)
    except BaseException:
        part.discard()
        raise
    name = f"{batch.id}_input.jsonl"
    file = part.finish(name, "messages", batch.created_at, WINDOW_SECONDS + RESULTS_SECONDS)
    try:
        store.add_batch(batch)
    except BaseException:
        store.delete_file(file)
        raise


@router.endpoint("GET", "", errors=(400,))
async def list_message_batches(
    http: Request,
    record: RecordDependency,
    batches: BatchesDependency,
    before_id: Annotated[str, Query(max_length=64)] = "",
    after_id: Annotated[str, Query(max_length=64)] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> MessageBatchPage:
    """The batches of the key, the latest first."""
    listed = batches.store.batches(record.key, "msgbatch_")
    page, has_more = _page(listed, before_id, after_id, limit)
    return MessageBatchPage(
        data=[_body(http, batches, batch) for batch in page],
        has_more=has_more,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


def _page(
    listed: Sequence[StoredBatch], before_id: str, after_id: str, limit: int
) -> tuple[Sequence[StoredBatch], bool]:
    """The page after, or before, the batch of an id, and whether there are more in that direction.
    Raises ApiError (400).
    """
    ids = [batch.id for batch in listed]
    if before_id and after_id:
        raise InvalidField("before_id", "give either before_id or after_id")
    for param, id in (("before_id", before_id), ("after_id", after_id)):
        if id and id not in ids:
            raise InvalidField(param, "there is no such batch")
    if before_id:
        end = ids.index(before_id)
        return listed[max(end - limit, 0) : end], end > limit
    first = ids.index(after_id) + 1 if after_id else 0
    return listed[first : first + limit], first + limit < len(listed)


@router.endpoint("GET", "/{id}", errors=(400, 404))
async def get_message_batch(
    id: str, http: Request, record: RecordDependency, batches: BatchesDependency
) -> MessageBatchBody:
    return _body(http, batches, _batch(batches, record, id))


@router.endpoint("GET", "/{id}/results", errors=(400, 404), response_class=FileResponse)
async def get_message_batch_results(
    id: str, record: RecordDependency, batches: BatchesDependency
) -> Response:
    """The results of a batch that has ended, as JSON Lines."""
    batch = _batch(batches, record, id)
    if batch.is_live:
        raise ApiError(400, f"The batch {id} has not ended, and has no results yet.")
    file = batches.store.file(batch.owner, batch.output_file_id or "")
    if file is None:
        raise ApiError(404, f"The results of {id} are no longer kept.", code="file_not_found")
    return FileResponse(batches.store.path(file), media_type=JSON_LINES)


@router.endpoint("POST", "/{id}/cancel", errors=(400, 404, 507))
async def cancel_message_batch(
    id: str, http: Request, record: RecordDependency, batches: BatchesDependency
) -> MessageBatchBody:
    """Ends a batch. The results that are there are kept. One that has ended is unchanged."""
    batch = _batch(batches, record, id)
    await batches.cancel(batch)
    return _body(http, batches, batch)


@router.endpoint("DELETE", "/{id}", errors=(400, 404))
async def delete_message_batch(
    id: str, record: RecordDependency, batches: BatchesDependency
) -> DeletedMessageBatch:
    """Deletes a batch that has ended, and its results."""
    batch = _batch(batches, record, id)
    if batch.is_live:
        raise ApiError(400, f"The batch {id} has not ended; cancel it first.")
    await batches.on_disk(partial(batches.store.delete_batch, batch))
    return DeletedMessageBatch(id=id)


def _batch(batches: BatchRunner, record: RequestRecord, id: str) -> StoredBatch:
    """Raises ApiError (404)."""
    batch = batches.store.batch(record.key, id)
    if batch is None or not batch.is_of_messages:
        raise ApiError(404, f"There is no batch '{id[:64]}'.", code="batch_not_found")
    return batch


def _body(http: Request, batches: BatchRunner, batch: StoredBatch) -> MessageBatchBody:
    """The batch for the client."""
    status: Literal["in_progress", "canceling", "ended"] = "in_progress"
    succeeded = errored = canceled = expired = 0
    if not batch.is_live:
        status, succeeded, errored = "ended", batch.completed, batch.failed
        unanswered = batch.total - succeeded - errored
        canceled = unanswered if batch.status == "cancelled" else 0
        expired = unanswered if batch.status == "expired" else 0
        errored = batch.total if batch.status == "failed" else errored
    elif batch.cancelling_at is not None:
        status = "canceling"
    has_results = batches.store.file(batch.owner, batch.output_file_id or "") is not None
    is_gone = not batch.is_live and not has_results
    url = f"{http.base_url}v1/messages/batches/{batch.id}/results"
    return MessageBatchBody(
        id=batch.id,
        processing_status=status,
        request_counts=MessageBatchCounts(
            processing=batch.total if batch.is_live else 0,
            succeeded=succeeded,
            errored=errored,
            canceled=canceled,
            expired=expired,
        ),
        ended_at=_time(batch.ended_at),
        created_at=datetime.fromtimestamp(batch.created_at, UTC).isoformat(),
        expires_at=datetime.fromtimestamp(batch.expires_at, UTC).isoformat(),
        archived_at=_time(batch.ended_at) if is_gone else None,
        cancel_initiated_at=_time(batch.cancelling_at),
        results_url=url if has_results and not batch.is_live else None,
    )


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()

"""`/v1/files` and `/v1/batches`: files of requests, which run while nothing else does."""

import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from uuid import uuid4

from fastapi import Query
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response

from server.batches.runner import BatchesDependency, BatchRunner
from server.batches.store import Part, StoredBatch, StoredFile, new_file_id
from server.dialects.endpoint import BODY_ERRORS, Endpoints
from server.errors import ApiError, ClientDisconnected, InvalidField
from server.http.body import body_too_large
from server.http.multipart import MultipartReader, boundary_of
from server.http.stream import NDJSON
from server.json_model import RequestModel
from server.record import RequestRecord
from server.service import Context, RecordDependency

PURPOSES = ("batch", "batch_output")
MAX_FIELD_BYTES = 1024  # of a form's fields that are no files

LEAST_SECONDS, MOST_SECONDS = 3600, 30 * 24 * 3600  # for which a file may be kept
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
ListedT = TypeVar("ListedT", StoredFile, StoredBatch)


class FileObject(BaseModel):
    """A file, as OpenAI describes it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class OutputExpiry(RequestModel):
    """How long the results are kept after their file is made."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_SECONDS, le=MOST_SECONDS)


class BatchRequest(RequestModel):
    """A batch of the requests of a file."""

    EXAMPLE: ClassVar = {
        "input_file_id": "file-0123456789abcdef",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }

    input_file_id: str = Field(max_length=64)
    endpoint: Endpoint
    completion_window: str = Field(
        pattern=r"^[1-9][0-9]{0,5}[smhd]$", description="Time from its creation to its end: 24h."
    )
    metadata: (
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None
    ) = Field(None, max_length=16)
    output_expires_after: OutputExpiry | None = None

    @property
    def window_seconds(self) -> int:
        """The completion window. Raises ApiError (400)."""
        seconds = int(self.completion_window[:-1]) * UNITS[self.completion_window[-1]]
        if seconds > MOST_SECONDS:
            raise InvalidField("completion_window", "must be at most 30d")
        return seconds


class BatchErrorObject(BaseModel):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchErrorObject]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class CachedTokens(BaseModel):
    cached_tokens: int


class ReasoningTokens(BaseModel):
    reasoning_tokens: int


class BatchTokens(BaseModel):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class BatchObject(BaseModel):
    """A batch, as OpenAI describes it."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchTokens
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


UPLOAD_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {
            "type": "string",
            "contentMediaType": NDJSON,
            "description": "The requests, one a line. The part has a filename.",
        },
        "purpose": {"type": "string", "const": "batch"},
        "expires_after[anchor]": {"type": "string", "const": "created_at"},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": LEAST_SECONDS,
            "maximum": MOST_SECONDS,
            "default": MOST_SECONDS,
        },
    },
}
"""The schema of the form with which a file is sent."""

router = Endpoints()


@router.endpoint(
    "POST",
    "/v1/files",
    errors=(*BODY_ERRORS, 507),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"multipart/form-data": {"schema": UPLOAD_FORM}},
        }
    },
)
async def upload_file(context: Context, batches: BatchesDependency) -> FileObject:
    """Keeps a file of requests. The body is a form (multipart/form-data) with `purpose` and `file`,
    and perhaps `expires_after[anchor]` and `expires_after[seconds]`.
    """
    http, record = context.http, context.record
    boundary = boundary_of(http.headers.get("content-type", ""))
    upload = _Upload(batches, record, context.service.settings.max_file_bytes)
    try:
        async with aclosing(MultipartReader(http.stream(), boundary).parts()) as parts:
            async for part in parts:
                if part.name == "file" and part.filename is not None:
                    await upload.keep(part.filename, part.data)
                else:
                    upload.fields[part.name] = await part.text(MAX_FIELD_BYTES)
        return file_object(await upload.finish())
    except ClientDisconnect:
        raise ClientDisconnected from None
    finally:
        await upload.close()


class _Upload:
    """A file that is arriving."""

    def __init__(self, batches: BatchRunner, record: RequestRecord, max_bytes: int) -> None:
        self.fields = dict[str, str]()
        self._batches = batches
        self._record = record
        self._max_bytes = max_bytes
        self._filename = ""
        self._part: Part | None = None

    async def keep(self, filename: str, data: Any) -> None:
        """Write the content of the file, piece by piece. Raises ApiError (400, 413, 507)."""
        if self._part is not None:
            raise InvalidField("file", "must be there once")
        batches, record = self._batches, self._record
        new = partial(batches.store.part, new_file_id(), record.key, record.client)
        self._part = part = await batches.on_disk(new)
        self._filename = filename
        async with aclosing(data) as pieces:
            async for piece in pieces:
                if part.n_bytes + len(piece) > self._max_bytes:
                    raise body_too_large(self._max_bytes)
                await batches.on_disk(partial(part.append, piece))
                record.replace_body(0)  # it is on the disk

    async def finish(self) -> StoredFile:
        """The file, once all of the form has come. Raises ApiError (400, 507)."""
        if self._part is None:
            raise InvalidField("file", "is missing, or has no filename")
        purpose = self.fields.get("purpose")
        if purpose != "batch":
            raise InvalidField("purpose", "must be batch: this server keeps files for batches")
        seconds = _kept_seconds(self.fields)
        part, now = self._part, int(time.time())
        finish = partial(part.finish, self._filename, "batch", now, seconds)
        file = await self._batches.on_disk(finish)
        self._part = None
        return file

    async def close(self) -> None:
        """Delete what has come, unless it is finished."""
        if self._part is not None:
            self._part.discard()


def _kept_seconds(fields: dict[str, str]) -> int:
    """How long a form wants its file kept. Raises ApiError (400)."""
    anchor = fields.get("expires_after[anchor]", "created_at")
    if anchor != "created_at":
        raise InvalidField("expires_after[anchor]", "must be created_at")
    wanted = fields.get("expires_after[seconds]", str(MOST_SECONDS))
    is_number = wanted.isascii() and wanted.isdigit() and len(wanted) < 9
    if not is_number or not LEAST_SECONDS <= int(wanted) <= MOST_SECONDS:
        problem = f"must be a number from {LEAST_SECONDS} to {MOST_SECONDS}"
        raise InvalidField("expires_after[seconds]", problem)
    return int(wanted)


@router.endpoint("GET", "/v1/files", errors=(400,))
async def list_files(
    record: RecordDependency,
    batches: BatchesDependency,
    purpose: Annotated[str, Query(max_length=64)] = "",
    after: Annotated[str, Query(max_length=64)] = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
) -> FileList:
    """The files of the key."""
    purposes = [one for one in PURPOSES if purpose in {"", one}]
    files = batches.store.files(record.key, purposes)
    page, has_more = page_after(files if order == "desc" else files[::-1], after, limit)
    return FileList(data=[file_object(file) for file in page], **_ends(page), has_more=has_more)


@router.endpoint("GET", "/v1/files/{id}", errors=(400, 404))
async def get_file(id: str, record: RecordDependency, batches: BatchesDependency) -> FileObject:
    return file_object(_file(batches, record.key, id))


@router.endpoint("GET", "/v1/files/{id}/content", errors=(400, 404), response_class=FileResponse)
async def get_file_content(
    id: str, record: RecordDependency, batches: BatchesDependency
) -> Response:
    """The content of a file: JSON Lines."""
    file = _file(batches, record.key, id)
    return FileResponse(batches.store.path(file), media_type=NDJSON)


@router.endpoint("DELETE", "/v1/files/{id}", errors=(400, 404, 409))
async def delete_file(id: str, record: RecordDependency, batches: BatchesDependency) -> DeletedFile:
    """Deletes a file, unless a batch that has not ended needs it."""
    file = _file(batches, record.key, id)
    await batches.on_disk(partial(batches.store.delete_file, file))
    return DeletedFile(id=file.id)


@router.endpoint("POST", "/v1/batches", body=BatchRequest, errors=(404, 429, 507))
async def create_batch(context: Context, batches: BatchesDependency) -> BatchObject:
    """Has the requests of a file answered, in steps that nothing else needs."""
    body, record = await context.read(BatchRequest), context.record
    now = int(time.time())
    expires_at = now + body.window_seconds
    file = _file(batches, record.key, body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise InvalidField("input_file_id", "must be a file with the purpose batch")
    kept = body.output_expires_after
    batch = StoredBatch(
        id=f"batch_{uuid4().hex}",
        owner=record.key,
        client=record.client,
        created_at=now,
        endpoint=body.endpoint,
        input_file_id=file.id,
        expires_at=expires_at,
        window=body.completion_window,
        output_seconds=MOST_SECONDS if kept is None else kept.seconds,
        metadata=body.metadata,
    )
    await batches.on_disk(partial(batches.store.add_batch, batch))
    batches.wake()
    return batch_object(batch)


@router.endpoint("GET", "/v1/batches", errors=(400,))
async def list_batches(
    record: RecordDependency,
    batches: BatchesDependency,
    after: Annotated[str, Query(max_length=64)] = "",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> BatchList:
    """The batches of the key, the latest first."""
    page, has_more = page_after(batches.store.batches(record.key, "batch_"), after, limit)
    return BatchList(data=[batch_object(one) for one in page], **_ends(page), has_more=has_more)


@router.endpoint("GET", "/v1/batches/{id}", errors=(400, 404))
async def get_batch(id: str, record: RecordDependency, batches: BatchesDependency) -> BatchObject:
    return batch_object(_batch(batches, record.key, id))


@router.endpoint("POST", "/v1/batches/{id}/cancel", errors=(400, 404, 409, 507))
async def cancel_batch(
    id: str, record: RecordDependency, batches: BatchesDependency
) -> BatchObject:
    """Ends a batch. The results that are there are kept."""
    batch = _batch(batches, record.key, id)
    if not batch.is_live:
        message = f"The batch {id} is {batch.status}: only one that has not ended is cancelled."
        raise ApiError(409, message, param="batch_id", code="batch_ended")
    await batches.cancel(batch)
    return batch_object(batch)


def page_after(
    listed: Sequence[ListedT], after: str, limit: int, param: str = "after"
) -> tuple[Sequence[ListedT], bool]:
    """The page that follows the object of an id, and whether there are more. Raises ApiError
    (400).
    """
    first = 0
    if after:
        first = next((at for at, one in enumerate(listed, 1) if one.id == after), 0)
        if not first:
            raise InvalidField(param, "there is no such object")
    return listed[first : first + limit], first + limit < len(listed)


def _ends(page: Sequence[StoredFile] | Sequence[StoredBatch]) -> dict[str, Any]:
    return {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}


def _file(batches: BatchRunner, owner: str, id: str, param: str = "file_id") -> StoredFile:
    """Raises ApiError (404)."""
    file = batches.store.file(owner, id)
    if file is None or file.purpose not in PURPOSES:
        message = f"There is no file '{id[:64]}'."
        raise ApiError(404, message, param=param, code="file_not_found")
    return file


def _batch(batches: BatchRunner, owner: str, id: str) -> StoredBatch:
    """Raises ApiError (404)."""
    batch = batches.store.batch(owner, id)
    if batch is None or batch.is_of_messages:
        message = f"There is no batch '{id[:64]}'."
        raise ApiError(404, message, param="batch_id", code="batch_not_found")
    return batch


def file_object(file: StoredFile) -> FileObject:
    """The file for the client."""
    return FileObject(
        id=file.id,
        bytes=file.n_bytes,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.filename,
        purpose="batch" if file.purpose == "batch" else "batch_output",
    )


def batch_object(batch: StoredBatch) -> BatchObject:
    """The batch for the client."""
    usage = batch.usage
    errors = [BatchErrorObject(**vars(error)) for error in batch.errors]
    return BatchObject(
        **batch.model_dump(include=BatchObject.model_fields.keys() - {"errors", "usage"}),
        errors=BatchErrors(data=errors) if errors else None,
        completion_window=batch.window,
        request_counts=RequestCounts(
            total=batch.total, completed=batch.completed, failed=batch.failed
        ),
        usage=BatchTokens(
            input_tokens=usage.input_tokens,
            input_tokens_details=CachedTokens(cached_tokens=usage.cached_tokens),
            output_tokens=usage.output_tokens,
            output_tokens_details=ReasoningTokens(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=usage.input_tokens + usage.output_tokens,
        ),
    )

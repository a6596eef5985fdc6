"""The objects that routes work with. One Service per application, passed as a dependency."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Generic, TypeVar, cast

from fastapi import Depends, Query, Request
from pydantic import BaseModel

from server.activity import RequestTracker
from server.errors import InvalidField
from server.fairness import Workers
from server.generation.compaction import HeadWarmer
from server.generation.images import UnpreparedImages
from server.generation.request_fields import PrioritizedRequest
from server.generation.requests import ServedModel
from server.generation.seals import Seals
from server.http.attachments import Attachments
from server.http.body import (
    Head,
    body_too_large,
    is_light,
    is_quick,
    parse,
    read_body,
    read_head,
)
from server.http.body import Model as BodyT
from server.http.stream import client_waiting
from server.images.preparation import Images
from server.metrics.metrics import Metrics
from server.models.model import LoadedModel, Model
from server.models.registry import ModelRegistry
from server.pressure.guard import MemoryGuard
from server.record import RequestRecord, request_record
from server.settings import Settings
from server.settings.folders import state_folder

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Service:
    models: ModelRegistry
    settings: Settings
    metrics: Metrics
    workers: Workers
    tracker: RequestTracker
    images: Images
    seals: Seals
    heads: HeadWarmer
    created: int  # seconds since the epoch
    guard: MemoryGuard | None = None  # None: the memory of the machine is not watched

    async def model(self, name: str, record: RequestRecord) -> ServedModel:
        """The model of that name, loaded if it is not; without a name, the first. It stays until
        the request of the record is over.

        Raises ApiError (400, 403, 404, 503) and EngineStopped.
        """
        await self.chosen(name, record)
        return await self.hold(name, record)

    async def chosen(self, name: str, record: RequestRecord) -> Model:
        """The model that the request names, loaded or not.

        Raises ApiError: 404 where there is none, 403 where the request's key may not use it.
        """
        await self.models.discover(name)
        return self.models.find(name, record.principal.allowed_models)

    async def hold(self, name: str, record: RequestRecord) -> ServedModel:
        """Hold the model of a name that `chosen` has looked up until the request is over."""
        using = self.models.using(name, record.key, record.keep_alive_seconds)
        model = await record.held.enter_async_context(using)
        record.model, record.own_model = model.name, self.models.find(name).name
        return model

    def is_admin(self, record: RequestRecord) -> bool:
        """Whether the request may do what admins may: without API keys, every request may."""
        return record.principal.is_admin or not self.settings.keys

    def check_priority(self, priority: int) -> None:
        """Raise ApiError (400) for a priority, unless the settings allow clients to choose one."""
        if priority and not self.settings.allow_priority:
            raise InvalidField(
                "priority", "this server does not let clients choose one (allow_priority is off)"
            )


def create_service(
    models: ModelRegistry,
    settings: Settings,
    metrics: Metrics,
    tracker: RequestTracker,
    guard: MemoryGuard | None = None,
) -> Service:
    """Called on the event loop."""
    return Service(
        models=models,
        settings=settings,
        metrics=metrics,
        workers=models.workers,
        tracker=tracker,
        images=models.images,
        seals=Seals(lambda: settings.disk_cache or state_folder()),
        heads=HeadWarmer(models.workers),
        created=int(time.time()),
        guard=guard,
    )


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request at its route: the HTTP request, its record, and the service."""

    http: Request
    record: RequestRecord
    service: Service

    async def arrived(
        self, kind: type[BodyT], check: Callable[[BodyT], object] = id
    ) -> "ArrivedBody[BodyT]":
        """The body of the request. `check` raises ApiError for what the types of `kind` allow.

        Raises ApiError (400) for one whose head cannot be read, and ClientDisconnected.
        """
        attachments = self._attachments()
        text = await read_body(self.http, attachments)
        body = ArrivedBody(self, kind, check, text, attachments)
        head = read_head(text) if is_light(text) else None
        if head is None:
            run = self.service.workers.run
            async with client_waiting(self.http.receive):
                head = await run(self.record.client, len(text), partial(read_head, text))
                if head is None:
                    head = await body.run(_head_of)
        body.head = head
        return body

    def _attachments(self) -> Attachments | None:
        """Where images in the body go as it arrives; None where no model takes any. Their files are
        deleted with the body, at the latest at the end of the request.
        """
        service = self.service
        if not service.models.may_take_images():
            return None
        most = service.settings.max_body_bytes
        too_large = partial(body_too_large, most)
        attachments = Attachments(service.images.store.new_file, most, too_large)
        self.record.held.callback(attachments.close)
        return attachments

    async def read(self, kind: type[BodyT]) -> BodyT:
        """The body of a route that needs no model. Raises ApiError and ClientDisconnected."""
        return await self.read_as(kind, lambda parsed: parsed)

    async def read_as(self, kind: type[BodyT], function: Callable[[BodyT], T]) -> T:
        """What a function makes, in a worker, of the body of a route that needs no model. Raises
        its errors, ApiError and ClientDisconnected.
        """
        body = ArrivedBody(self, kind, id, await read_body(self.http))
        async with client_waiting(self.http.receive):
            return await body.run(function)

    @asynccontextmanager
    async def prepared(
        self,
        kind: type[BodyT],
        prepare: "Prepare[BodyT, T]",
        check: Callable[[BodyT], object] = id,
    ) -> AsyncIterator[tuple[ServedModel, T]]:
        """What `prepare` makes of the body in a worker, once its model is held. A client that
        leaves ends the wait for the model, and the block.
        """
        body = await self.arrived(kind, check)
        async with client_waiting(self.http.receive):
            await body.find()
            model = await body.hold()
            made = await body.run(lambda parsed: prepare(parsed, model, self.record))
            body.replace(0)
            yield model, made


def _head_of(body: BaseModel) -> Head:
    return Head(**{name: getattr(body, name, None) for name in Head.model_fields})


Prepare = Callable[[BodyT, ServedModel, RequestRecord], T]
"""Makes something of a body for the model, in a worker thread. Raises ApiError (400)."""


class ArrivedBody(Generic[BodyT]):
    """A body that has come. It is bytes until it is replaced; what is parsed of it lives for one
    call of a worker.
    """

    head: Head

    def __init__(
        self,
        context: RequestContext,
        kind: type[BodyT],
        check: Callable[[BodyT], object],
        text: bytes,
        attachments: Attachments | None = None,
    ) -> None:
        self._context = context
        self._kind = kind
        self._check = check
        self._text = text
        self._attachments = attachments
        self.postpones = False
        """Whether what takes long waits until the stream has begun: `run` raises UnpreparedImages,
        rather than have the images prepared."""

    async def find(self, name: str | None = None) -> Model:
        """The model of the name, which is the body's unless given. Unless the model is ready the
        body is checked, so that no model is loaded for a wrong one.

        Raises ApiError (400, 403, 404).
        """
        service, record = self._context.service, self._context.record
        model = await service.chosen(self._name(name), record)
        if not model.is_ready:
            await self.check()
        return model

    async def check(self) -> None:
        """Raise ApiError (400) for a body that is wrong."""
        if is_quick(self._text):  # no wait for the client's other requests
            self._parsed(id)
        else:
            await self.run(id)

    async def hold(self, name: str | None = None) -> ServedModel:
        """Hold the model that `find` has found until the request is over."""
        return await self._context.service.hold(self._name(name), self._context.record)

    async def run(self, function: Callable[[BodyT], T], named_bytes: int = 0) -> T:
        """Call a function with the parsed body in a worker. `named_bytes` is what it reads besides.
        Raises its errors, and ApiError (400) for a body that is wrong, or has a priority where
        clients may choose none.

        A function that raises UnpreparedImages is called again when they are prepared.
        """
        service, record = self._context.service, self._context.record
        call = partial(self._parsed, function)
        n_bytes = len(self._text) + named_bytes
        try:
            return await service.workers.run(record.client, n_bytes, call)
        except UnpreparedImages as error:
            if self.postpones:
                raise
            needed = error
        await service.images.prepare(needed, record, self._attachments)
        return await service.workers.run(record.client, n_bytes, call)

    def replace(self, kept_bytes: int) -> None:
        """Drop the body with its files, of which kept_bytes are kept elsewhere until the answer is
        complete. Raises ApiError (503) where they are too many.
        """
        self._text = b""
        if self._attachments is not None:
            self._attachments.close()
        self._context.record.replace_body(kept_bytes)

    def _parsed(self, function: Callable[[BodyT], T]) -> T:
        body = parse(self._text, self._kind, self._attachments)
        if isinstance(body, PrioritizedRequest):
            self._context.service.check_priority(body.priority)
        self._check(body)
        return function(body)

    def _name(self, name: str | None) -> str:
        return (self.head.model or "") if name is None else name


async def _service(request: Request) -> Service:
    return cast(Service, request.app.state.service)


async def _record(request: Request) -> RequestRecord:
    return request_record(request.scope)


async def _context(request: Request) -> RequestContext:
    return RequestContext(request, request_record(request.scope), await _service(request))


# All are coroutines: a plain function would wait for a free worker thread, and so would `/health`.
ServiceDependency = Annotated[Service, Depends(_service)]
RecordDependency = Annotated[RequestRecord, Depends(_record)]
Context = Annotated[RequestContext, Depends(_context)]

ModelName = Annotated[
    str, Query(max_length=256, description="Of several models, which one; unset, the first.")
]


async def _loaded(service: ServiceDependency, model: ModelName = "") -> LoadedModel:
    return service.models.loaded(model)


LoadedDependency = Annotated[LoadedModel, Depends(_loaded)]
"""The model that the query names. Raises ApiError (404, 409): looking loads nothing."""

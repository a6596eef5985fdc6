"""The objects that routes work with. One Service per application, passed as a dependency."""

import time
from dataclasses import dataclass
from typing import Annotated, Generic, cast

from fastapi import Depends, Query, Request

from server.activity import RequestTracker
from server.errors import InvalidField
from server.generation.request_fields import PrioritizedRequest
from server.generation.requests import ServedModel
from server.http.body import BodyReader
from server.http.body import Model as BodyT
from server.metrics.metrics import Metrics
from server.models.model import LoadedModel, Model
from server.models.registry import ModelRegistry
from server.record import RequestRecord, request_record
from server.settings import Settings
from server.workers import Workers


@dataclass(frozen=True, slots=True)
class Service:
    models: ModelRegistry
    settings: Settings
    metrics: Metrics
    workers: Workers
    bodies: BodyReader
    tracker: RequestTracker
    created: int  # seconds since the epoch

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
) -> Service:
    return Service(
        models=models,
        settings=settings,
        metrics=metrics,
        workers=models.workers,
        bodies=BodyReader(models.workers),
        tracker=tracker,
        created=int(time.time()),
    )


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request at its route: the HTTP request, its record, and the service."""

    http: Request
    record: RequestRecord
    service: Service

    async def model(self, name: str) -> ServedModel:
        """See Service.model."""
        return await self.service.model(name, self.record)


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


@dataclass(frozen=True)
class JsonBody(Generic[BodyT]):
    """Dependency: the request's body as a model. Raises ApiError (400), also for a priority where
    clients may choose none.
    """

    model: type[BodyT]

    async def __call__(self, request: Request, service: ServiceDependency) -> BodyT:
        body = await service.bodies.read(request, self.model)
        if isinstance(body, PrioritizedRequest):
            service.check_priority(body.priority)
        return body

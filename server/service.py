"""The objects that routes work with. One Service per application, passed as a dependency."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, cast

from anyio.abc import TaskGroup
from fastapi import Depends, Request

from engine.api import Engine
from server.activity.series import SeriesRecord
from server.activity.tracker import RequestTracker
from server.cache_feed import CacheFeed
from server.dialects.responses.storage.background import BackgroundResponses
from server.dialects.responses.storage.store import ResponseStore
from server.errors import ApiError, invalid
from server.generation.models import ServedModel, served_models
from server.generation.replays import Replays
from server.metrics.metrics import Metrics
from server.record import RequestRecord, request_record
from server.schemas.cache import Remembered
from server.settings import Settings
from server.transport.body import BodyReader, Model
from server.transport.unsent import UnsentBudget
from server.workers import Workers


@dataclass(frozen=True, slots=True)
class Service:
    models: Mapping[str, ServedModel]  # by name; an alias is an entry of its own
    settings: Settings
    metrics: Metrics
    workers: Workers
    bodies: BodyReader
    responses: ResponseStore
    background: BackgroundResponses
    feed: CacheFeed
    tracker: RequestTracker
    series: SeriesRecord
    created: int  # seconds since the epoch
    agents: tuple[str, ...]  # that `rootstock launch` knows

    def resolve(self, name: str) -> ServedModel:
        """The model of that name; without a name, the first.

        Raises ApiError (404) for one that is not served.
        """
        if not name:
            return next(iter(self.models.values()))
        if name not in self.models:
            served = ", ".join(f"'{name}'" for name in self.models)
            message = f"The model '{name}' does not exist; this server has {served}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.models[name]

    @property
    def engine(self) -> Engine:
        """Whose cache and requests `/admin` shows, and on which health depends."""
        return self.resolve("").engine

    @property
    def replays(self) -> Replays:
        """Of the model, whichever of its names was asked for."""
        return self.resolve("").replays

    def remembered(self) -> Remembered:
        return Remembered(replays=len(self.replays), responses=len(self.responses))

    def check_priority(self, priority: int) -> None:
        """Raise ApiError (400) for a priority, unless the settings allow clients to choose one."""
        if priority and not self.settings.allow_priority:
            raise invalid(
                "priority: this server does not let clients choose one (allow_priority is off)",
                "priority",
            )


def create_service(
    engine: Engine,
    settings: Settings,
    metrics: Metrics,
    unsent: UnsentBudget,
    tasks: TaskGroup,
    agents: Sequence[str],
) -> Service:
    """`tasks` are those that outlive the request that begins them."""
    workers, tracker = Workers(), RequestTracker()
    models = served_models(engine, settings, workers)
    return Service(
        models=models,
        settings=settings,
        metrics=metrics,
        workers=workers,
        bodies=BodyReader(workers),
        responses=ResponseStore(settings.max_stored_responses, settings.max_stored_bytes),
        background=BackgroundResponses(
            tasks, unsent, workers, tracker, settings.max_background_responses
        ),
        feed=CacheFeed(engine, next(iter(models)), tasks),
        tracker=tracker,
        series=SeriesRecord(),
        created=int(time.time()),
        agents=tuple(agents),
    )


async def _service(request: Request) -> Service:
    return cast(Service, request.app.state.service)


async def _record(request: Request) -> RequestRecord:
    return request_record(request.scope)


# Both are coroutines: a plain function would wait for a free worker thread, and so would `/health`.
ServiceDependency = Annotated[Service, Depends(_service)]
RecordDependency = Annotated[RequestRecord, Depends(_record)]


@dataclass(frozen=True)
class JsonBody(Generic[Model]):
    """Dependency: the request's body as a model."""

    model: type[Model]

    async def __call__(self, request: Request, service: ServiceDependency) -> Model:
        return await service.bodies.read(request, self.model)

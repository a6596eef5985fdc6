"""What the routes work with. One per application, reached through dependencies, never a global."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, cast

from fastapi import Depends, Request

from engine.api import Engine
from server.dialects.chat import Envelope
from server.errors import ApiError, invalid
from server.generation.plan import AnswerPlanner
from server.generation.prompt import PromptEncoder
from server.generation.replays import Replays
from server.metrics import Metrics
from server.middleware import RequestRecord, request_record
from server.settings import Settings
from server.transport.body import BodyReader, Model


@dataclass(frozen=True, slots=True)
class Service:
    engine: Engine
    settings: Settings
    metrics: Metrics
    bodies: BodyReader
    prompts: PromptEncoder
    answers: AnswerPlanner
    replays: Replays
    model: str  # the name it is served under
    created: int  # seconds since the epoch

    def check_model(self, name: str) -> None:
        """Raise ApiError (404) for a model that is not served. No name means the one there is."""
        if name and name != self.model:
            message = f"The model '{name}' does not exist; this server has '{self.model}'."
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_priority(self, priority: int) -> None:
        """Raise ApiError (400) for a priority, unless the settings allow clients to choose one."""
        if priority and not self.settings.allow_priority:
            raise invalid(
                "priority: this server does not let clients choose one (allow_priority is off)",
                "priority",
            )

    def envelope(self, id: str) -> Envelope:
        return Envelope(id, int(time.time()), self.model, self.engine.card.fingerprint)


def create_service(engine: Engine, settings: Settings, metrics: Metrics) -> Service:
    return Service(
        engine=engine,
        settings=settings,
        metrics=metrics,
        bodies=BodyReader(),
        prompts=PromptEncoder(engine.tokenizer, engine.card),
        answers=AnswerPlanner(engine.tokenizer, settings.tool_parser, settings.reasoning_parser),
        replays=Replays(),
        model=settings.served_model_name or _public_name(engine.card.name),
        created=int(time.time()),
    )


def _public_name(name: str) -> str:
    """A repository's name as it is; of a directory the last part alone."""
    path = Path(name).expanduser()
    return Path(os.path.abspath(path)).name if path.is_dir() else name  # a link keeps its own


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

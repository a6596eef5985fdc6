"""The HTTP application around one engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import create_task_group
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from engine.api import Engine, EngineError
from server import __version__
from server.dialects.errors import handle, handle_client_left, handle_wrong_method
from server.errors import ApiError, ClientLeft
from server.metrics import EngineTelemetry, HttpAnswers, Metrics
from server.middleware import BearerAuth, LoopbackHost, RequestLog, SameOrigin
from server.openapi import OpenApiDocument
from server.routes import (
    admin,
    chat,
    completions,
    messages,
    metrics,
    models,
    render,
    responses,
    status,
    tokens,
)
from server.service import create_service
from server.settings import Settings, is_loopback
from server.transport.intake import Bodies, Intake
from server.transport.unsent import UnsentBudget
from server.vllm_metrics import vllm_families

ROUTERS = (
    *(chat, completions, responses, render, messages, models, tokens),
    *(status, metrics, admin),
)


def create_app(engine: Engine, settings: Settings, telemetry: EngineTelemetry) -> FastAPI:
    """The application. Whoever runs it drains the engine; `telemetry` is what that reports to."""
    aliases = (vllm_families,) if settings.vllm_metric_names else ()
    answers = HttpAnswers()
    unsent = UnsentBudget(settings.max_unsent_bytes, settings.max_total_unsent_bytes)
    metrics_page = Metrics(telemetry, answers, unsent, aliases)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with create_task_group() as tasks:  # which end with the engine
            app.state.service = create_service(engine, settings, metrics_page, unsent, tasks)
            yield

    app = FastAPI(
        title="Rootstock",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,  # FastAPI's own, with pages that load scripts from elsewhere
        middleware=_middleware(settings, answers, unsent),
        redirect_slashes=False,
    )
    for error in (ApiError, EngineError, HTTPException, RequestValidationError):
        app.add_exception_handler(error, handle)
    app.add_exception_handler(405, handle_wrong_method)
    app.add_exception_handler(ClientLeft, handle_client_left)
    for module in ROUTERS:
        app.include_router(module.router)
    described = OpenApiDocument(app, settings).answer
    methods = ["GET", "HEAD"]
    app.add_api_route("/openapi.json", described, methods=methods, include_in_schema=False)
    return app


def _middleware(settings: Settings, answers: HttpAnswers, unsent: UnsentBudget) -> list[Middleware]:
    """Outermost first."""
    return [
        Middleware(RequestLog, answers=answers),
        Middleware(Intake, bodies=_bodies(settings), unsent=unsent),
        *_access_control(settings),
    ]


def _bodies(settings: Settings) -> Bodies:
    return Bodies(
        settings.max_body_bytes, settings.max_total_body_bytes, settings.body_timeout_seconds
    )


def _access_control(settings: Settings) -> list[Middleware]:
    """A key, or where there is none, what keeps a browser from being used against the daemon."""
    if settings.api_key is not None:
        return [Middleware(BearerAuth, api_key=settings.api_key.get_secret_value())]
    if is_loopback(settings.host):
        return [Middleware(SameOrigin), Middleware(LoopbackHost)]
    return [Middleware(SameOrigin)]

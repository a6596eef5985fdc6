"""The HTTP application around the models."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain

from anyio import create_task_group
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from engine.api import EngineError
from server import __version__
from server.access.admission import Hosts, Origins, Policy
from server.activity import RequestTracker
from server.admin import activity, cache, model_routes, pages, status
from server.admin.activity import SeriesRecord
from server.admin.watch import Watch
from server.dialects import completions, decisions, embeddings, tokens, warming
from server.dialects.chat import routes as chat
from server.dialects.error_shapes import (
    handle,
    handle_client_disconnected,
    handle_unknown_url,
    handle_wrong_method,
)
from server.dialects.messages import routes as messages
from server.dialects.ollama import routes as ollama
from server.dialects.responses import routes as responses
from server.dialects.responses.background import BackgroundResponses
from server.dialects.responses.store import ResponseStore
from server.errors import ApiError, ClientDisconnected
from server.gateway import Gateway, body_budget, output_budget
from server.http.stream import task_scope
from server.metrics.metrics import HttpAnswers, HttpCounts, Metrics
from server.metrics.tables import TABLES, vllm_tables
from server.models.registry import ModelRegistry
from server.openapi import OpenApiDocument
from server.service import create_service
from server.settings import Settings

SECTIONS = {
    "Answers, as OpenAI has them": (chat.router, completions.router, responses.router),
    "Answers, as Anthropic has them": (messages.router,),
    "Answers, as Ollama has them": (ollama.router,),
    "Decisions, embeddings and ranking": (decisions.router, embeddings.router),
    "Models": (model_routes.list_router,),
    "Models, as Ollama has them": (ollama.models_router,),
    "Prompts and tokens": (
        chat.render_router,
        completions.render_router,
        tokens.router,
        warming.router,
    ),
    "Watching the daemon": (status.router,),
    "Models in memory": (model_routes.router,),
    "The cache and running requests": (activity.router, cache.router),
    "Pages": (pages.router,),
}
DASHBOARD = {
    "The cache as it moves": (cache.tree_router, activity.stream_router, pages.page_router)
}
"""The routes as the API's description groups them: a section's name is their tag."""


def create_app(
    models: ModelRegistry, settings: Settings, launch: pages.Launch = pages.NO_LAUNCH
) -> FastAPI:
    """The application. Its caller runs and drains the models. `launch`: the agents for which the
    page has a line.
    """
    answers, output, tracker = HttpAnswers(), output_budget(settings), RequestTracker()
    policy = Policy(
        settings.keys,
        Hosts(settings.host, settings.allowed_host),
        Origins(settings.cors_origin),
        has_namespaces=settings.cache_namespace == "key",
    )
    tables = TABLES + (vllm_tables(tracker.sequences) if settings.vllm_metric_names else ())
    metrics_page = Metrics(HttpCounts(answers, output, policy.refusals, models.images), tables)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with create_task_group() as tasks:  # which end with the models
            service = create_service(models, settings, metrics_page, tracker)
            app.state.service = service
            app.state.series, app.state.watch = SeriesRecord(), Watch(models, tasks)
            app.state.launch = launch
            app.state.responses = ResponseStore(
                settings.max_stored_responses, settings.max_stored_bytes
            )
            app.state.background_responses = BackgroundResponses(
                tasks, output, service.workers, service.tracker, settings.max_background_responses
            )
            async with task_scope() as samplers:
                samplers.start_soon(app.state.series.run, models.stats)
                yield

    app = FastAPI(
        title="Rootstock",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,  # FastAPI's own, whose pages load scripts from elsewhere
        middleware=[
            Middleware(
                Gateway,
                settings=settings,
                policy=policy,
                bodies=body_budget(settings),
                output=output,
                answers=answers,
                tracker=tracker,
                may_take_images=models.may_take_images,
            )
        ],
        redirect_slashes=False,
    )
    for error in (ApiError, EngineError, HTTPException, RequestValidationError):
        app.add_exception_handler(error, handle)
    app.add_exception_handler(404, handle_unknown_url)
    app.add_exception_handler(405, handle_wrong_method)
    app.add_exception_handler(ClientDisconnected, handle_client_disconnected)
    sections = SECTIONS | (DASHBOARD if settings.dashboard else {})
    for section, routers in sections.items():
        for router in routers:
            app.include_router(router, tags=[section])
    described = OpenApiDocument(app, settings, list(chain(*sections.values()))).answer
    methods = ["GET", "HEAD"]
    app.add_api_route("/openapi.json", described, methods=methods, include_in_schema=False)
    return app

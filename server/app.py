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
from server.batches.answer import LineAnswerer
from server.batches.runner import BatchRunner
from server.batches.store import BatchStore
from server.dialects import (
    completions,
    decisions,
    embeddings,
    openai_batches,
    tokens,
    warming,
)
from server.dialects.chat import routes as chat
from server.dialects.error_shapes import (
    error_response,
    handle,
    handle_client_disconnected,
    handle_unknown_url,
    handle_wrong_method,
)
from server.dialects.messages import batches as message_batches
from server.dialects.messages import routes as messages
from server.dialects.ollama import routes as ollama
from server.dialects.responses import routes as responses
from server.dialects.responses.background import BackgroundResponses
from server.dialects.responses.store import ResponseStore
from server.errors import ApiError, ClientDisconnected
from server.fairness import Budget
from server.gateway import Gateway, body_budget, output_budget
from server.http.stream import task_scope
from server.metrics.metrics import HttpAnswers, HttpCounts, Metrics
from server.metrics.tables import TABLES, vllm_tables
from server.models.registry import ModelRegistry
from server.openapi import OpenApiDocument
from server.pressure.guard import MemoryGuard
from server.service import create_service
from server.settings import Settings

LINES_WAITING = 8
"""Lines of batches that wait in the engine while as many as may run do, so that the next is there
when one ends. They take few places of its queue."""

SECTIONS = {
    "Answers, as OpenAI has them": (chat.router, completions.router, responses.router),
    "Answers, as Anthropic has them": (messages.router,),
    "Answers, as Ollama has them": (ollama.router,),
    "Files and batches": (openai_batches.router, message_batches.router),
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


LINE_ROUTERS = (
    *(chat.router, completions.router, responses.router, embeddings.router, messages.router),
)
"""The routes that lines of batches may name, and some that no batch has as its endpoint."""


def create_app(
    models: ModelRegistry,
    settings: Settings,
    launch: pages.Launch = pages.NO_LAUNCH,
    guard: MemoryGuard | None = None,
) -> FastAPI:
    """The application. Its caller runs and drains the models. `launch`: the agents for which the
    page has a line. Without `guard` the memory of the machine is not watched.
    """
    answers, output, tracker = HttpAnswers(), output_budget(settings), RequestTracker()
    bodies, lines = body_budget(settings), FastAPI(openapi_url=None)
    batches = _batches(settings, lines, bodies, output)
    policy = Policy(
        settings.keys,
        Hosts(settings.host, settings.allowed_host),
        Origins(settings.cors_origin),
        has_namespaces=settings.cache_namespace == "key",
    )
    tables = TABLES + (vllm_tables(tracker.sequences) if settings.vllm_metric_names else ())
    counts = HttpCounts(answers, output, policy.refusals, models.images, batches)
    metrics_page = Metrics(counts, tables, guard)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with create_task_group() as tasks:  # which end with the models
            service = create_service(models, settings, metrics_page, tracker, guard)
            app.state.service = service
            app.state.series, app.state.watch = SeriesRecord(), Watch(models, tasks)
            app.state.launch = launch
            app.state.responses = ResponseStore(
                settings.max_stored_responses, settings.max_stored_bytes
            )
            app.state.background_responses = BackgroundResponses(
                tasks, output, service.workers, service.tracker, settings.max_background_responses
            )
            app.state.batches, lines.state = batches, app.state
            if batches is not None:
                tasks.start_soon(batches.run, models.draining)
            async with task_scope() as samplers:
                samplers.start_soon(app.state.series.run, models.stats)
                if guard is not None:
                    samplers.start_soon(guard.run, policy.close, tracker)
                yield
        if batches is not None:
            batches.store.close()

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
                bodies=bodies,
                output=output,
                answers=answers,
                tracker=tracker,
                may_take_images=models.may_take_images,
            )
        ],
        redirect_slashes=False,
    )
    for answering in (app, lines):
        _handle_errors(answering)
    for router in LINE_ROUTERS:
        lines.include_router(router)
    sections = SECTIONS | (DASHBOARD if settings.dashboard else {})
    for section, routers in sections.items():
        for router in routers:
            app.include_router(router, tags=[section])
    described = OpenApiDocument(app, settings, list(chain(*sections.values()))).answer
    methods = ["GET", "HEAD"]
    app.add_api_route("/openapi.json", described, methods=methods, include_in_schema=False)
    return app


def _handle_errors(app: FastAPI) -> None:
    for error in (ApiError, EngineError, HTTPException, RequestValidationError):
        app.add_exception_handler(error, handle)
    app.add_exception_handler(404, handle_unknown_url)
    app.add_exception_handler(405, handle_wrong_method)
    app.add_exception_handler(ClientDisconnected, handle_client_disconnected)


def _batches(
    settings: Settings, lines: FastAPI, bodies: Budget, output: Budget
) -> BatchRunner | None:
    """The batches of the folder that the settings name. `lines` answers their lines. Raises OSError
    where the folder cannot be used, or another daemon has it.
    """
    if settings.batches is None:
        return None
    store = BatchStore(settings.batches, settings.max_batch_bytes, settings.max_batches)
    has_namespaces = settings.cache_namespace == "key"
    answerer = LineAnswerer(
        lines, error_response, settings.keys, bodies, output, has_namespaces=has_namespaces
    )
    waiting = min(LINES_WAITING, max(settings.engine.max_waiting // 4, 1))
    return BatchRunner(
        store, answerer, settings.engine.max_running + waiting, settings.max_body_bytes
    )

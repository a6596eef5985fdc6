"""The HTTP application around the models."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from anyio import create_task_group
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from engine.api import EngineError
from server import __version__
from server.access.refusals import Refusals
from server.dialects.errors import (
    handle,
    handle_client_left,
    handle_unknown_url,
    handle_wrong_method,
)
from server.errors import ApiError, ClientLeft
from server.metrics.metrics import HttpAnswers, Metrics
from server.metrics.vllm import vllm_families
from server.middleware.stack import middleware
from server.openapi import OpenApiDocument
from server.registry import ModelRegistry
from server.routes import (
    activity,
    admin,
    admin_models,
    cache,
    cache_tree,
    chat,
    completions,
    daemon,
    dashboard,
    embeddings,
    messages,
    metrics,
    models,
    ollama,
    ollama_embed,
    ollama_models,
    page,
    render,
    rerank,
    responses,
    status,
    tokens,
)
from server.service import create_service
from server.settings import Settings
from server.transport.unsent import UnsentBudget
from server.transport.waiting import task_scope

SECTIONS = {
    "Answers, as OpenAI has them": (chat, completions, responses),
    "Answers, as Anthropic has them": (messages,),
    "Answers, as Ollama has them": (ollama, ollama_embed),
    "Embeddings and ranking": (embeddings, rerank),
    "Models": (models,),
    "Models, as Ollama has them": (ollama_models,),
    "Prompts and tokens": (render, tokens),
    "Watching the daemon": (status, daemon, metrics),
    "Models in memory": (admin_models,),
    "The cache and what runs": (admin, cache),
    "Pages": (dashboard,),
}
DASHBOARD = {"The cache as it moves": (cache_tree, activity, page)}
"""The routes as the API's description groups them: a section's name is their tag."""


def create_app(models: ModelRegistry, settings: Settings, agents: Sequence[str] = ()) -> FastAPI:
    """The application. Whoever runs it runs and drains the models; `agents` are those that the page
    says how to launch.
    """
    aliases = (vllm_families,) if settings.vllm_metric_names else ()
    answers = HttpAnswers()
    unsent = UnsentBudget(settings.max_unsent_bytes, settings.max_total_unsent_bytes)
    refusals = Refusals()
    metrics_page = Metrics(answers, unsent, refusals, aliases)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with create_task_group() as tasks:  # which end with the models
            service = create_service(models, settings, metrics_page, unsent, tasks, agents)
            app.state.service = service
            async with task_scope() as samplers:
                samplers.start_soon(service.series.run, models.stats)
                yield

    app = FastAPI(
        title="Rootstock",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,  # FastAPI's own, whose pages load scripts from elsewhere
        middleware=middleware(settings, answers, unsent, refusals),
        redirect_slashes=False,
    )
    for error in (ApiError, EngineError, HTTPException, RequestValidationError):
        app.add_exception_handler(error, handle)
    app.add_exception_handler(404, handle_unknown_url)
    app.add_exception_handler(405, handle_wrong_method)
    app.add_exception_handler(ClientLeft, handle_client_left)
    for section, modules in (SECTIONS | (DASHBOARD if settings.dashboard else {})).items():
        for module in modules:
            app.include_router(module.router, tags=[section])
    described = OpenApiDocument(app, settings).answer
    methods = ["GET", "HEAD"]
    app.add_api_route("/openapi.json", described, methods=methods, include_in_schema=False)
    return app

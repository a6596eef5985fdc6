"""The models that requests can name, each loaded when it is needed."""

import asyncio
import logging
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from anyio import TASK_STATUS_IGNORED, Event, create_task_group, sleep, to_thread
from anyio.abc import TaskGroup, TaskStatus

from engine.api import Engine, EngineStopped, ModelError, Report
from engine.launch import (
    about_draft_model,
    cache_folder,
    fetch_repository,
    free_bytes,
    launch,
    local_checkpoint,
    needed_memory,
)
from engine.values.settings import EngineConfig
from engine.values.stats import EngineStats, ModelMemory, RequestInfo
from server.errors import ApiError, ModelNotFound, busy, not_loaded
from server.fairness import Workers
from server.generation.requests import ServedModel, served_models
from server.generation.warming import ReadPrompt, warm_file
from server.images.fetch import ImageFetcher
from server.images.preparation import Images
from server.images.store import ImageStore
from server.models.hub import CachedNames, Downloads, FetchRepository
from server.models.model import LoadedModel, Model
from server.models.pool import LoadFailed, ModelPool, NeverFits, PoolError, WaitedTooLong
from server.settings import Settings
from server.settings.models import ModelSettings
from server.settings.prompts import PromptFileError, read_prompts

BUDGET_SHARE = 0.8
"""The share of the memory free at start that several models share: other programs grow, too."""

CORRECTION_SECONDS = 1.0
"""Seconds between two corrections of the models' needs by the memory of their processes."""

STORAGE_SHARE = 0.25
"""The share of the budget for the KV cache of one model whose settings do not specify its size."""

log = logging.getLogger("rootstock")

StartEngine = Callable[[EngineConfig, Report], Awaitable[Engine]]


class ModelRegistry:
    """The models by all their names. Belongs to one event loop; `run` must run."""

    def __init__(
        self,
        settings: Settings,
        start: StartEngine = launch,
        needs: Callable[[EngineConfig, int, int], ModelMemory] = needed_memory,
        fetch: FetchRepository = fetch_repository,
    ) -> None:
        """Raises ModelError where the machine does not say what memory it has."""
        self.settings = settings
        self.workers = Workers()
        self.images = Images(
            ImageStore(cache_folder() / "images", settings.image_store_bytes),
            ImageFetcher(settings.fetch_images),
            self.workers,
        )
        self.draining = Event()  # when `drain` has begun
        self.closed = Event()  # when all models have been drained
        self._start = start
        self._needed_memory = needs
        self._fetch = fetch
        self._cached = CachedNames()
        self._models: dict[str, Model] = {}  # by all their names
        self._is_alone = len(settings.each_model()) == 1 and not settings.on_demand
        self.pool = ModelPool(
            self._measure, self._load, self._budget_bytes(), settings.load_timeout_seconds
        )
        for model in settings.each_model():
            self._add(model)
        self._tasks: TaskGroup  # this and the next two: since `run`
        self._read_prompt: ReadPrompt
        self.downloads: Downloads

    def may_take_images(self) -> bool:
        """Whether a model takes images, or may when it is loaded."""
        cards = [model.card for model in self.known.values()]
        return any(card is None or card.images is not None for card in cards)

    @property
    def known(self) -> Mapping[str, Model]:
        """All models by their own names, in memory or not. The first one is the default."""
        return self.pool.models

    async def run(
        self, read_prompt: ReadPrompt, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED
    ) -> None:
        """Serve the models until cancelled. `read_prompt` reads the prompts of `warm_prompts`."""
        self._read_prompt = read_prompt
        async with create_task_group() as self._tasks:
            self.downloads = Downloads(self._fetch, self._tasks)
            await self._tasks.start(self.pool.run)
            task_status.started()
            while True:
                await sleep(CORRECTION_SECONDS)
                for name, loaded in self.all_loaded().items():
                    try:
                        await self._correct(loaded)
                    except Exception:
                        log.exception("cannot measure the memory of %s", name)

    async def preload(self) -> None:
        """Load the models that the settings preload, in their order, as long as there is room.
        Raises PoolError.
        """
        for model in self.known.values():
            if model.settings.preload:
                await self.pool.preload(model)

    def unhealthy_reasons(self) -> list[str]:
        """A reason for each model that does not serve, and would not if it were requested."""
        models = self.known.values()
        return [f"{model.name} {model.problem}" for model in models if not model.is_healthy]

    def find(self, name: str, allowed: frozenset[str] | None = None) -> Model:
        """The model of that name; without a name, the first model.

        Raises ApiError: 404 where no model has the name, 403 where a key that allows only these
        names may not use it.
        """
        model = self._models.get(name) if name else next(iter(self.known.values()))
        if model is None:
            names = ", ".join(f"'{one}'" for one, _ in self.named(allowed))
            raise ModelNotFound(name, names or "none for this key")
        if not model.is_allowed(name or model.name, allowed):
            message = f"This API key may not use the model '{name or model.name}'."
            raise ApiError(403, message, param="model", code="model_not_allowed")
        return model

    def has(self, name: str) -> bool:
        """Whether a model has this name."""
        return name in self._models

    def is_served_from(self, repository: str) -> bool:
        """Whether a model comes from this repository, or has its name."""
        sources = {known.settings.source for known in self.known.values()}
        read = {known.card.name for known in self.known.values() if known.card}
        return self.has(repository) or repository in sources | read

    def named(self, allowed: frozenset[str] | None) -> Iterator[tuple[str, Model]]:
        """Each name that a key may use which allows these names, with its model."""
        for name, model in self._models.items():
            if model.is_allowed(name, allowed):
                yield name, model

    async def discover_all(self) -> None:
        """With `on_demand`, register every cached repository, for /v1/models."""
        if self.settings.on_demand:
            for repository in await self._cached.names():
                self._discovered(repository)

    async def discover(self, name: str) -> None:
        """With `on_demand`, register the repository of that name if it is cached."""
        if not name or self.has(name) or not self.settings.on_demand:
            return
        if name in await self._cached.names():
            self._discovered(name)

    def _discovered(self, repository: str) -> None:
        if not self.has(repository):
            self._add(self.settings.of_model({"model": repository, "preload": False}))

    @asynccontextmanager
    async def using(
        self, name: str, key: str, keep_seconds: float | None
    ) -> AsyncIterator[ServedModel]:
        """The model of that name, loaded if it is not, and not unloaded while the block runs.

        After the block it stays loaded for `keep_seconds` at least: see ModelPool.using.

        Raises ApiError, and EngineStopped where the server stops.
        """
        model = self.find(name)
        try:
            async with self.pool.using(model, key, keep_seconds) as loaded:
                yield loaded.served[name or model.name]
        except PoolError as error:
            raise _refusal(name or model.name, error) from error

    def loaded(self, name: str = "") -> LoadedModel:
        """The model in memory. Raises ApiError: 404 where no model has this name, 409 where it is
        not loaded.
        """
        model = self.find(name)
        if model.loaded is None:
            raise not_loaded(f"The model '{model.name}' {model.public_state.words}.")
        return model.loaded

    def all_loaded(self) -> dict[str, LoadedModel]:
        """The models in memory, by their own names."""
        models = self.known.items()
        return {name: model.loaded for name, model in models if model.loaded is not None}

    async def stats(self) -> dict[str, EngineStats]:
        """The statistics of each loaded model, by its own name. Does not wait for running steps."""
        loaded = self.all_loaded()
        stats = await asyncio.gather(*(one.stats() for one in loaded.values()))
        return dict(zip(loaded, stats, strict=True))

    async def requests(self) -> list[RequestInfo]:
        """The live sequences of all models, when the running steps have ended; of an engine that
        does not answer soon, as last read.

        Raises EngineStopped if there are engines and all have stopped.
        """
        loaded = self.all_loaded().values()
        found = await asyncio.gather(*(_sequences(one.engine) for one in loaded))
        stopped = [each for each in found if isinstance(each, EngineStopped)]
        if stopped and len(stopped) == len(found):
            raise stopped[0]
        return [info for each in found if not isinstance(each, EngineStopped) for info in each]

    async def drain(self, timeout_seconds: float) -> None:
        """Refuse new requests, and end all models when their requests have ended. Downloads end at
        once.
        """
        self.draining.set()
        self.downloads.stop()
        await self.pool.drain(timeout_seconds)
        await to_thread.run_sync(self.images.store.close)
        self.closed.set()

    def _add(self, settings: ModelSettings) -> None:
        is_pinned = settings.pinned or (self._is_alone and settings.ttl_seconds is None)
        model = Model(settings, is_pinned=is_pinned)
        for name in model.aliases:
            if self.has(name):
                raise ModelError(f"two models are called '{name}' (served_model_name)")
        self._models |= dict.fromkeys(model.aliases, model)
        self.pool.add(model)

    def _budget_bytes(self) -> int:
        if self.settings.memory_budget is not None:
            return self.settings.memory_budget
        return sys.maxsize if self._is_alone else int(free_bytes() * BUDGET_SHARE)

    async def _measure(self, model: Model) -> int:
        """Bytes of memory that the model needs. Its repository and that of its draft model are
        fetched if they are not in the cache.
        """
        if self._is_alone:
            return 0 if self.settings.memory_budget is None else self.pool.budget_bytes
        config = self.settings.config_of(model.settings)
        await self._fetch_missing(model, model.settings.source)
        if (draft_model := config.draft_model_in_use) is not None:
            with about_draft_model(draft_model):
                await self._fetch_missing(model, draft_model)
        model.progress, model.fetched_share = "measuring the memory that it needs", None
        budget_bytes = self.pool.budget_bytes
        storage_bytes = int(budget_bytes * STORAGE_SHARE)
        model.planned = await to_thread.run_sync(
            self._needed_memory, config, budget_bytes, storage_bytes
        )
        return model.planned.total_bytes

    async def _fetch_missing(self, model: Model, source: str) -> None:
        """Fetch a repository that `model` needs, if it is not in the cache. Raises ModelError."""
        model.progress, model.fetched_share = f"looking for {source}", None
        if await to_thread.run_sync(local_checkpoint, source) is None:
            await self._fetch(source, model.report_fetched)

    async def _load(self, model: Model, memory_bytes: int) -> LoadedModel:
        model.progress = ""
        config = self.settings.config_of(model.settings, memory_bytes or None)
        engine = await self._start(config, model.report)
        model.card = engine.card
        served = await to_thread.run_sync(  # which tries the chat template
            served_models, model.aliases.values(), engine, model.settings, model.replays
        )
        loaded = LoadedModel(model, engine, served)
        await self._correct(loaded)
        if model.settings.warm_prompts is not None:
            self._tasks.start_soon(self._warm, loaded, model.settings.warm_prompts)
        return loaded

    async def _warm(self, loaded: LoadedModel, path: Path) -> None:
        """Compute the prompts of a file while no request is answered. Its model is not held: it may
        be unloaded meanwhile.
        """
        with loaded.warming:
            try:
                prompts = await to_thread.run_sync(read_prompts, path)
            except PromptFileError as error:  # it has changed since the start
                log.error("%s: warm_prompts: %s", loaded.model.name, error)
            else:
                served = loaded.served[loaded.model.name]
                await warm_file(
                    prompts, served, self.workers, self._read_prompt, self.images.prepare
                )

    async def _correct(self, loaded: LoadedModel) -> None:
        """A model needs what was planned, or what its process takes if that is more."""
        memory = (await loaded.stats()).memory.model
        if not self._is_alone:
            self.pool.correct(loaded.model, memory.total_bytes)


def _refusal(name: str, error: PoolError) -> Exception:
    message = f"The model '{name}' cannot be used: {error}."
    match error:
        case NeverFits():
            return ApiError(400, message, param="model", code="model_too_large")
        case LoadFailed(retry_after_seconds=seconds):
            return busy(503, message, "model_failed", math.ceil(max(seconds, 1)))
        case WaitedTooLong():
            return busy(503, message, "model_not_ready", 5)
        case _:
            return EngineStopped(str(error))


async def _sequences(engine: Engine) -> Sequence[RequestInfo] | EngineStopped:
    """The live sequences. An engine that has stopped has none."""
    try:
        return await engine.requests()
    except EngineStopped as error:
        return error

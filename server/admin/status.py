"""`/health`, `/load`, `/version`, `/metrics` and `/admin/daemon`: what watchers, routers and
operators want to know of a daemon.
"""

from collections.abc import Iterator
from typing import Literal, TypeAlias

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel, ConfigDict
from starlette.responses import PlainTextResponse, Response

from engine.api import EngineStopped
from engine.values.stats import MemoryStats
from server import __version__
from server.admin.alarms import losses
from server.admin_schema import FactLine, Remembered, fact_lines, with_facts
from server.dialects.endpoint import Endpoints
from server.dialects.responses.store import StoreDependency
from server.models.policy import Loading
from server.pressure.policy import Step
from server.service import ModelName, ServiceDependency
from server.settings import Settings

router = Endpoints()

SettingValue: TypeAlias = bool | int | float | str | list[str] | dict[str, str] | None


class Health(BaseModel):
    status: Literal["ok", "degraded"]
    reason: str | None = None  # why it is degraded; left out where it is not
    memory: str | None = None  # while the machine is short of it: what is done, and for which limit


class Version(BaseModel):
    version: str


class Load(BaseModel):
    """The load in sequences: a request with `n: 4` counts as four."""

    server_load: int  # requested and not over yet; vLLM's name
    running: int  # computed in the present step
    waiting: int  # queued now


class KVEventAddress(BaseModel):
    """Where a loaded model publishes KV events. All but `model` is as vLLM has it."""

    data_parallel_rank: int = 0
    endpoint: str
    replay_endpoint: str | None
    topic: str
    model: str


@with_facts()
class DaemonModel(BaseModel):
    """The model that is served."""

    model_config = ConfigDict(from_attributes=True)

    max_sequence_tokens: int  # what `max_context_tokens` and the KV cache hold of one sequence


class SettingInForce(BaseModel):
    name: str
    value: SettingValue  # a secret is stars
    is_default: bool
    description: str


class Daemon(BaseModel):
    version: str
    names: list[str]  # that requests may use, the model's own first
    model: DaemonModel | None  # None while it is not loaded
    facts: list[FactLine]  # of the model, for people; empty while it is not loaded
    settings: list[SettingInForce]
    memory: MemoryStats | None  # None while it is not loaded
    decode: (
        str | None
    )  # whether steady decodes are compiled or eager, and why; None while it is not loaded
    remembered: Remembered


@router.endpoint("GET", "/health", response_model_exclude_none=True)
async def health(service: ServiceDependency) -> Health:
    """Red as soon as no model can be served, also while ranks of it are missing. Degraded, and
    still 200, where one of several has failed, where one is being loaded again, where something has
    been lost that only another start brings back, where the disk cache cannot be written, or where
    no request is admitted for lack of memory.
    """
    known = service.models.known.values()
    reasons = service.models.unhealthy_reasons()
    if len(reasons) == len(known):
        raise EngineStopped(f"No model can be served: {'; '.join(reasons)}.")
    reasons += [
        f"{model.name} has failed and is being loaded again: {model.failure.reason}"
        for model in known
        if model.is_healthy and isinstance(model.state, Loading) and model.failure is not None
    ]
    for stats in (await service.models.stats()).values():
        reasons += [loss.problem for loss in losses(stats)]
    guard = service.guard
    memory = None if guard is None else guard.problem or None
    if guard is not None and guard.state.step >= Step.ADMISSION:
        reasons.append(f"memory is short: {memory}")
    if reasons:
        return Health(status="degraded", reason="; ".join(reasons), memory=memory)
    return Health(status="ok", memory=memory)


@router.endpoint("GET", "/load")
async def load(service: ServiceDependency) -> Load:
    """Answers at once: it does not wait for a step."""
    stats = (await service.models.stats()).values()
    return Load(
        server_load=sum(each.sequences.live for each in stats),
        running=sum(each.running for each in stats),
        waiting=sum(each.waiting for each in stats),
    )


@router.endpoint("GET", "/version")
async def version() -> Version:
    return Version(version=__version__)


@router.endpoint("GET", "/kv_event_sources")
async def kv_event_sources(service: ServiceDependency) -> list[KVEventAddress]:
    """The addresses of all loaded models that publish events, with the ports in use."""
    cards = [(model.name, model.card) for model in service.models.known.values() if model.loaded]
    return [
        KVEventAddress(
            endpoint=card.kv_events.endpoint,
            replay_endpoint=card.kv_events.replay_endpoint,
            topic=card.kv_events.topic,
            model=name,
        )
        for name, card in cards
        if card is not None and card.kv_events is not None
    ]


@router.endpoint("GET", "/metrics", errors=None, response_class=PlainTextResponse)
async def metrics(service: ServiceDependency) -> Response:
    await service.models.stats()
    text = service.metrics.render(service.models.known.values())
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.endpoint("GET", "/admin/daemon", errors=(400, 404))
async def daemon(
    service: ServiceDependency, responses: StoreDependency, model: ModelName = ""
) -> Daemon:
    """Answers at once, with the settings as read at start, without secrets."""
    known = service.models.find(model)
    loaded = known.loaded
    stats = None if loaded is None else await loaded.engine.stats()
    return Daemon(
        version=__version__,
        names=list(known.aliases),
        model=None if loaded is None else DaemonModel.model_validate(loaded.engine.card),
        facts=[] if loaded is None else list(fact_lines(loaded.engine.card)),
        settings=list(_in_force(service.settings)),
        memory=None if stats is None else stats.memory,
        decode=None if stats is None or stats.decode is None else stats.decode.why,
        remembered=Remembered(replays=known.n_replays, responses=len(responses)),
    )


def _in_force(settings: Settings) -> Iterator[SettingInForce]:
    """The settings as JSON, with secrets masked by pydantic."""
    values = settings.model_dump(mode="json")
    defaults = Settings.model_construct().model_dump(mode="json")
    for name, field in Settings.model_fields.items():
        yield SettingInForce(
            name=name,
            value=values[name] if name != "models" else [m.source for m in settings.models],
            is_default=values[name] == defaults[name],
            description=field.description or "",
        )

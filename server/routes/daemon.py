"""`GET /admin/daemon`: what an operator wants to know of the daemon that runs."""

from collections.abc import Iterator

from server import __version__
from server.dialects.endpoint import Endpoints
from server.dialects.responses.store import StoreDependency
from server.schemas.cache import MemoryUse, Remembered
from server.schemas.daemon import Daemon, DaemonModel, SettingInForce
from server.service import ModelName, ServiceDependency
from server.settings import Settings

router = Endpoints(prefix="/admin")


@router.endpoint("GET", "/daemon", errors=(400, 404))
async def daemon(
    service: ServiceDependency, responses: StoreDependency, model: ModelName = ""
) -> Daemon:
    """At once, whatever step is running. Settings are as they were read at start, and no secret is
    among them.
    """
    own = service.models.find(model)
    known = service.models.known[own]
    loaded = service.models.all_loaded().get(own)
    stats = None if loaded is None else await loaded.engine.stats()
    return Daemon(
        version=__version__,
        names=[alias.name for alias in known.aliases],
        model=None if loaded is None else DaemonModel.model_validate(loaded.engine.card),
        settings=list(_in_force(service.settings)),
        memory=None if stats is None else MemoryUse.model_validate(stats.memory),
        remembered=Remembered(replays=known.n_replays, responses=len(responses)),
    )


def _in_force(settings: Settings) -> Iterator[SettingInForce]:
    """As JSON has them, in which pydantic masks secrets."""
    values = settings.model_dump(mode="json")
    defaults = Settings.model_construct().model_dump(mode="json")
    for name, field in Settings.model_fields.items():
        yield SettingInForce(
            name=name,
            value=values[name] if name != "models" else [m.source for m in settings.models],
            is_default=values[name] == defaults[name],
            description=field.description or "",
        )

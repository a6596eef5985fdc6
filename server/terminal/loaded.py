"""Choose which of a daemon's models a command is about."""

import typer

from server.pool.states import State
from server.schemas.pool import PooledModelInfo
from server.terminal.client.admin import Admin
from server.terminal.errors import NotLoaded
from server.terminal.text import printable

LOADED = frozenset({State.READY, State.DRAINING})
"""The states in which a model has a cache to look into."""


def loaded_model(daemon: Admin, name: str | None) -> str:
    """The name of the model to look into: the given one, or else the first that is loaded.

    Where that is not the daemon's first model, a line on standard error says so. Raises NotLoaded
    where the model, or every model, is not loaded. A name that the daemon does not list is returned
    as it is: the daemon refuses it.
    """
    models = daemon.models().models
    loaded = [model.id for model in models if model.state in LOADED]
    if name is not None:
        named = next((model for model in models if name in _names(model)), None)
        if named is None or named.id in loaded:
            return name
        hint = f"; loaded: {', '.join(loaded)}" if loaded else _how_to_load([named])
        raise NotLoaded(f"{name} {named.state.words}{hint}")
    if not loaded:
        raise none_loaded(models)
    first = models[0]
    if first.id != loaded[0]:
        note = f"{first.id} {first.state.words}; showing {loaded[0]}"
        typer.echo(printable(note), err=True)
    return loaded[0]


def none_loaded(models: list[PooledModelInfo]) -> NotLoaded:
    """The error where every model of the daemon has to be loaded first."""
    return NotLoaded(f"no model is loaded{_how_to_load(models)}")


def _names(model: PooledModelInfo) -> set[str]:
    names = {model.id, *model.aliases}
    return names | {f"{name}:{adapter}" for name in names for adapter in model.adapters}


def _how_to_load(models: list[PooledModelInfo]) -> str:
    if len(models) == 1:
        return f"; `rootstock load {models[0].id}` loads it"
    return f"; `rootstock load NAME` loads one of {', '.join(model.id for model in models)}"

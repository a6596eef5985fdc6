"""The calls of the server to an engine's process, as data that both ends read."""

from collections.abc import Mapping
from typing import Any, Protocol

from engine.api import Engine
from engine.remote.wire import Call
from engine.values.model import ModelCard
from engine.values.request import Request
from engine.values.settings import EngineConfig


class _Hosted(Protocol):
    """The calls that `engine.api.Engine` does not have: the server's end makes them for it."""

    async def load(self, config: EngineConfig, log_level: int) -> ModelCard:
        """Load the model. The first call."""
        ...

    async def submit(self, request: Request) -> None:
        """Queue a request. Its events may come before this returns."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request. Does nothing if it has ended."""
        ...


class Calls:
    """The table of calls."""

    load = Call(_Hosted.load)
    submit = Call(_Hosted.submit)
    abort = Call(_Hosted.abort)
    check = Call(Engine.check)
    prepare_image = Call(Engine.prepare_image)
    stats = Call(Engine.stats)
    clear_cache = Call(Engine.clear_cache)
    give_back = Call(Engine.give_back)
    probe = Call(Engine.probe)
    requests = Call(Engine.requests)
    tree = Call(Engine.tree)
    node = Call(Engine.node)
    drain = Call(Engine.drain)


CALLS: Mapping[str, Call[..., Any]] = {
    name: call for name, call in vars(Calls).items() if isinstance(call, Call)
}
"""The calls by their names."""

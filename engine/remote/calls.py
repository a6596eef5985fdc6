"""The calls of the server to an engine's process, as data that both ends read."""

from collections.abc import Callable, Coroutine, Mapping
from inspect import signature
from types import GenericAlias
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, get_type_hints

from pydantic import TypeAdapter

from engine.api import Engine
from engine.remote import wire
from engine.values.model import ModelCard
from engine.values.request import Request
from engine.values.settings import EngineConfig

P = ParamSpec("P")
R = TypeVar("R")


class Call(Generic[P, R]):
    """The name of a call, and the types of its arguments and of its result, which are read from the
    annotations of a method.
    """

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> None:
        hints = get_type_hints(method)
        self.result: TypeAdapter[R] = TypeAdapter(hints.pop("return"))
        arguments: Any = GenericAlias(tuple, tuple(hints.values()))
        self.arguments: TypeAdapter[tuple[Any, ...]] = TypeAdapter(arguments, config=wire.BYTES)
        self.name = method.__name__
        self.signature = signature(method)

    def json(self, *arguments: P.args, **named: P.kwargs) -> bytes:
        """All arguments as JSON, by position, defaults included."""
        bound = self.signature.bind(None, *arguments, **named)
        bound.apply_defaults()
        return self.arguments.dump_json(bound.args[1:])


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
    stats = Call(Engine.stats)
    clear_cache = Call(Engine.clear_cache)
    probe = Call(Engine.probe)
    requests = Call(Engine.requests)
    tree = Call(Engine.tree)
    node = Call(Engine.node)
    drain = Call(Engine.drain)


CALLS: Mapping[str, Call[..., Any]] = {
    name: call for name, call in vars(Calls).items() if isinstance(call, Call)
}
"""The calls by their names."""

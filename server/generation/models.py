"""A loaded model, by the names that requests use."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.api import Engine
from server.generation.beginnings import Beginnings
from server.generation.plan import AnswerPlanner
from server.generation.prompt import PromptEncoder
from server.generation.replays import Replays
from server.settings.conversation import ConversationSettings
from server.workers import Workers


@dataclass(frozen=True, slots=True)
class ModelAlias:
    """One name that requests may use for a model, with or without an adapter.

    `root` is the first of the names that mean the same. For an adapter, `parent` is the name of the
    model that it changes.
    """

    name: str
    root: str
    adapter: str = ""
    parent: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model under one of its names, with its engine, tokenizer threads, formats and replays."""

    alias: ModelAlias
    engine: Engine
    prompts: PromptEncoder
    planner: AnswerPlanner
    replays: Replays
    beginnings: Beginnings
    workers: Workers

    @property
    def name(self) -> str:
        return self.alias.name

    @property
    def adapter(self) -> str:
        return self.alias.adapter

    @property
    def fingerprint(self) -> str:
        """Changes with what the model says: its own, and its adapter's."""
        card = self.engine.card
        adapter = card.adapters.get(self.adapter)
        return f"{card.fingerprint}-{adapter}" if adapter else card.fingerprint


def model_aliases(names: Sequence[str], adapters: Iterable[str]) -> tuple[ModelAlias, ...]:
    """The names of a model, its own first, then each adapter as `name:adapter` of each name."""
    own = names[0]
    adapted = [
        ModelAlias(f"{name}:{adapter}", f"{own}:{adapter}", adapter, own)
        for adapter in adapters
        for name in names
    ]
    return (*(ModelAlias(name, own) for name in names), *adapted)


def served_models(
    names: Iterable[ModelAlias],
    engine: Engine,
    settings: ConversationSettings,
    replays: Mapping[str, Replays],
    workers: Workers,
) -> Mapping[str, ServedModel]:
    """The engine's model by each of its names. `replays` are by adapter: no adapter gets those of
    another.
    """
    prompts = PromptEncoder(engine.tokenizer, engine.card, workers)
    planner = AnswerPlanner(engine.tokenizer, settings)
    beginnings = Beginnings()
    return {
        alias.name: ServedModel(
            alias, engine, prompts, planner, replays[alias.adapter], beginnings, workers
        )
        for alias in names
    }

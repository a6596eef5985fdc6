"""A loaded model, by the names that requests use."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.api import Engine
from server.generation.beginnings import Beginnings
from server.generation.plan import AnswerPlanner
from server.generation.prompt import PromptEncoder
from server.generation.replays import Replays
from server.settings.conversation import ConversationSettings
from server.workers import Workers


@dataclass(frozen=True, slots=True)
class Naming:
    """One name that requests may use. `root` is the first of those that mean the same, and `parent`
    that of the model which the adapter changes.
    """

    name: str
    root: str
    adapter: str = ""
    parent: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model under one of its names, with its engine, tokenizer threads, formats and replays."""

    naming: Naming
    engine: Engine
    prompts: PromptEncoder
    planner: AnswerPlanner
    replays: Replays
    beginnings: Beginnings
    workers: Workers

    @property
    def name(self) -> str:
        return self.naming.name

    @property
    def adapter(self) -> str:
        return self.naming.adapter

    @property
    def fingerprint(self) -> str:
        """Changes with what the model says: its own, and its adapter's."""
        card = self.engine.card
        adapter = card.adapters.get(self.adapter)
        return f"{card.fingerprint}-{adapter}" if adapter else card.fingerprint


def namings(names: Iterable[str], adapters: Iterable[str]) -> tuple[Naming, ...]:
    """A model's own name and its aliases; then each adapter as `name:adapter`, of each of these."""
    first, *aliases = names
    each = [first, *aliases]
    adapted = [
        Naming(f"{name}:{adapter}", f"{first}:{adapter}", adapter, first)
        for adapter in adapters
        for name in each
    ]
    return (*(Naming(name, first) for name in each), *adapted)


def served_models(
    names: Iterable[Naming],
    engine: Engine,
    settings: ConversationSettings,
    replays: Mapping[str, Replays],
    workers: Workers,
) -> Mapping[str, ServedModel]:
    """The engine's model by each of its names. What adapters said is replayed to none but
    themselves: `replays` are by adapter.
    """
    prompts = PromptEncoder(engine.tokenizer, engine.card, workers)
    planner = AnswerPlanner(engine.tokenizer, settings)
    beginnings = Beginnings()
    return {
        naming.name: ServedModel(
            naming, engine, prompts, planner, replays[naming.adapter], beginnings, workers
        )
        for naming in names
    }

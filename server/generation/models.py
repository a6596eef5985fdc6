"""A loaded model, by the names that requests use."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.api import Engine
from server.generation.plan import AnswerPlanner
from server.generation.prompt import PromptEncoder
from server.generation.replays import Replays
from server.settings.models import ConversationSettings
from server.workers import Workers

Tokens = tuple[int, ...]

REMEMBERED = 32
"""First texts that a CommonPrefixTracker keeps."""
MOST_TOKENS = 4096
"""Tokens that it keeps of each."""


class CommonPrefixTracker:
    """Remembers the prefixes of the last requests' first texts, by their salt: clients write the
    same instruction before every text, one request at a time. Safe in several threads.
    """

    def __init__(self) -> None:
        self._latest = deque[tuple[str, Tokens]](maxlen=REMEMBERED)

    def shared_tokens(self, salt: str, texts: Sequence[Tokens]) -> list[int]:
        """How many tokens of each text are a prefix of another text, of these or of the latest."""
        known = [tokens for other, tokens in tuple(self._latest) if other == salt]
        found = _shared([*texts, *known])[: len(texts)]
        self._latest.append((salt, texts[0][:MOST_TOKENS]))
        return found


def _shared(texts: Sequence[Tokens]) -> list[int]:
    """The longest common prefix of each text: after sorting, it is with a neighbour."""
    found = [0] * len(texts)
    order = sorted(range(len(texts)), key=texts.__getitem__)
    for before, after in pairwise(order):
        common = _common(texts[before], texts[after])
        found[before] = max(found[before], common)
        found[after] = max(found[after], common)
    return found


def _common(left: Tokens, right: Tokens) -> int:
    """The length of the common prefix, found by bisection: a slice is compared at once."""
    longest = min(len(left), len(right))
    lengths = range(1, longest + 1)
    return bisect_left(lengths, True, key=lambda n: left[:n] != right[:n])


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
    prefixes: CommonPrefixTracker
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
    prefixes = CommonPrefixTracker()
    return {
        alias.name: ServedModel(
            alias, engine, prompts, planner, replays[alias.adapter], prefixes, workers
        )
        for alias in names
    }

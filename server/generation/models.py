"""A loaded model, by the names that requests use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.api import Engine
from server.generation.plan import AnswerPlanner
from server.generation.prompt import PromptEncoder
from server.generation.replays import Replays
from server.settings.conversation import ConversationSettings
from server.workers import Workers


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model under one of its names, with its engine, tokenizer threads, formats and replays."""

    name: str
    engine: Engine
    prompts: PromptEncoder
    planner: AnswerPlanner
    replays: Replays
    workers: Workers


def served_models(
    names: Sequence[str],
    engine: Engine,
    settings: ConversationSettings,
    replays: Replays,
    workers: Workers,
) -> Mapping[str, ServedModel]:
    """The engine's model by each of its names, the first of which is its own."""
    model = ServedModel(
        name=names[0],
        engine=engine,
        prompts=PromptEncoder(engine.tokenizer, engine.card, workers),
        planner=AnswerPlanner(engine.tokenizer, settings),
        replays=replays,
        workers=workers,
    )
    return {name: replace(model, name=name) for name in names}

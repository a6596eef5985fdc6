"""The served models, by the names that requests use."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.api import Engine
from server.generation.plan import AnswerPlanner
from server.generation.prompt import PromptEncoder
from server.generation.replays import Replays
from server.settings import Settings
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
    engine: Engine, settings: Settings, workers: Workers
) -> Mapping[str, ServedModel]:
    """The engine's model by each of its names, the first of which is its own."""
    names = settings.served_model_name or (_public_name(engine.card.name),)
    model = ServedModel(
        name=names[0],
        engine=engine,
        prompts=PromptEncoder(engine.tokenizer, engine.card, workers),
        planner=AnswerPlanner(engine.tokenizer, settings),
        replays=Replays(),
        workers=workers,
    )
    return {name: replace(model, name=name) for name in names}


def _public_name(name: str) -> str:
    """A repository's name as it is; of a directory the last component."""
    path = Path(name).expanduser()
    return Path(os.path.abspath(path)).name if path.is_dir() else name  # a link keeps its own

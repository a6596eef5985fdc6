"""Why a model cannot be served."""

from engine.api import EngineError


class ModelError(EngineError):
    """The model cannot be found, read, or fitted into this machine."""


class UnsupportedModel(ModelError):
    """The model's architecture cannot run over the arena."""

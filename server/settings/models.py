"""The models: which, under which names, and when they are in memory."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError
from pydantic_settings import NoDecode

from engine.values.settings import DEFAULT_NAME, EngineConfig
from server.settings.conversation import ConversationSettings
from server.settings.disk_cache import DiskCacheSettings
from server.settings.engine import EngineSettings
from server.settings.texts import Texts

MODEL = "A directory or a Hugging Face repository; left empty, the embedded demonstration model."
NAMES = "The model's name in the API; more than one are aliases. Unset, its own."


class ResidencySettings(BaseModel):
    ttl_seconds: float | None = Field(
        None,
        ge=0,
        description="How long a model stays loaded after a request, unless the request states a "
        "`keep_alive` of its own; the longest wish holds. Unset: without end.",
    )
    pinned: bool = Field(
        False,
        description="Never unload it, be it for its age or for another model; load it again should "
        "its process die.",
    )
    preload: bool = Field(
        True,
        description="Load it at start, where all such models fit; the others, and without it, are "
        "loaded when a request names them.",
    )


class ModelSettings(ConversationSettings, EngineSettings, ResidencySettings):
    """One model's: what its entry in `models` says, and for the rest what holds for all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field("", max_length=4096, description=MODEL)
    served_model_name: Texts = Field((), description=NAMES)

    @model_validator(mode="after")
    def _adapters_have_names_of_their_own(self) -> Self:
        _check_adapters(self.served_model_name, self.adapters)
        return self

    @property
    def source(self) -> str:
        """The directory or repository that it comes from."""
        return self.model or DEFAULT_NAME


def _check_adapters(names: Iterable[str], adapters: Iterable[str]) -> None:
    adapted = {f"{name}:{adapter}" for name in names for adapter in adapters}
    for name in adapted.intersection(names):
        raise PydanticCustomError(
            "served_model_name",
            "served_model_name: {name} is the name of an adapter",
            {"name": name},
        )


def from_json(value: object) -> object:
    """A list of models as an environment variable has it, which is JSON; any other value as it is.

    A text that is not JSON stays a text, which validation refuses like any other text.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


class PoolSettings(BaseModel):
    model: Texts = Field((), description=f"{MODEL} Several are loaded when they are asked for.")
    served_model_name: Texts = Field((), description=NAMES)
    models: Annotated[tuple[ModelSettings, ...], NoDecode, BeforeValidator(from_json)] = Field(
        (),
        description="In YAML: more models, each with a `model` and whatever of these settings is "
        "to be another for it than for all.",
    )
    on_demand: bool = Field(
        False, description="Let requests name every model in the Hugging Face cache."
    )
    memory_budget: ByteSize | None = Field(
        None,
        gt=0,
        description="The most that all models together take of memory, such as 24GiB. Unset: for "
        "one model no limit but the machine's, for several four fifths of what is free at start.",
    )
    load_timeout_seconds: float = Field(
        600.0, gt=0, description="How long a request waits for its model to be loaded."
    )


# Of several bases the last has the first fields
class ModelsSettings(ConversationSettings, DiskCacheSettings, ResidencySettings, PoolSettings):
    @model_validator(mode="after")
    def _a_name_is_of_one_model(self) -> Self:
        if self.served_model_name and len(self.model) + len(self.models) > 1:
            raise PydanticCustomError(
                "served_model_name",
                "served_model_name: is of one model; of several, each has its own in models",
            )
        _check_adapters(self.served_model_name, self.adapters)
        return self

    @model_validator(mode="after")
    def _each_entry_is_valid_with_what_holds_for_all(self) -> Self:
        """Check each entry of `models` again, with the shared settings that it does not replace."""
        faults: list[InitErrorDetails] = []
        given = self._given_to_each()
        n_named = len(given) - len(self.models)
        for index, entry in enumerate(given[n_named:]):
            try:
                self.of_model(entry)
            except ValidationError as error:
                faults += (
                    InitErrorDetails(
                        type=PydanticCustomError(fault["type"], fault["msg"]),
                        loc=("models", index, *fault["loc"]),
                        input=fault["input"],
                    )
                    for fault in error.errors()
                )
        if faults:
            raise ValidationError.from_exception_data("models", faults)
        return self

    def each_model(self) -> tuple[ModelSettings, ...]:
        """Of `model` and of `models`, in this order; the embedded one where there is none."""
        return tuple(map(self.of_model, self._given_to_each()))

    def of_model(self, given: dict[str, Any]) -> ModelSettings:
        """One model's settings: what is given, and for the rest what holds for all."""
        shared = set(ModelSettings.model_fields) - {"model", "served_model_name"}
        return ModelSettings.model_validate(self.model_dump(include=shared) | given)

    def config_of(self, model: ModelSettings, memory_bytes: int | None = None) -> EngineConfig:
        """What an engine is told of all that; it takes at most so much memory, or what is free."""
        config = model.engine_config(model.model, self.disk_cache_config())
        return replace(config, memory_bytes=memory_bytes)

    def _given_to_each(self) -> list[dict[str, Any]]:
        """What is set for each model alone, in the order of `each_model`."""
        names = self.model or (() if self.models else ("",))
        given: list[dict[str, Any]] = [{"model": name} for name in names]
        given += [entry.model_dump(exclude_unset=True) for entry in self.models]
        if len(given) == 1 and self.served_model_name:
            given[0]["served_model_name"] = self.served_model_name
        return given

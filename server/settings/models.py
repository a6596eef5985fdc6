"""The settings of models: how each is computed and cached, its names, and when it is in memory."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import starmap
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError
from pydantic_settings import NoDecode

from engine.values.settings import (
    DEMO_NAME,
    LEAST_DISK_BYTES,
    MINILM_NAME,
    SMOLLM2_NAME,
    AdapterConfig,
    DiskCacheConfig,
    DiskWrites,
    EngineConfig,
    Section,
    Setting,
)
from server.parsing.registry import REASONING_FORMATS, TOOL_FORMATS, go_together
from server.settings.prompts import PromptFileError, read_prompts
from server.settings.values import FROM_HOME, Adapters, SettingsModel, Texts

MODEL = (
    "A directory, a Hugging Face repository, smollm2, minilm (an embedder) or rootstock-demo (the "
    "embedded model)."
)
NAMES = "The model's name in the API; more than one are aliases. Unset, its own."

_DISK = DiskCacheConfig(directory=Path(), max_bytes=LEAST_DISK_BYTES)
"""Declares the defaults of the disk cache."""

_WITH_UNIT = {int: ByteSize, int | None: ByteSize | None}
"""The types of numbers of bytes, and the types that also take a text such as 8GiB."""

_Model = TypeVar("_Model", bound=BaseModel)


def _with_engine_settings(model: type[_Model]) -> type[_Model]:
    """Extend a model by a field for each field of EngineConfig that has a Setting: of the same
    name, type, limits and default.
    """
    hints = get_type_hints(EngineConfig, include_extras=True)
    added: dict[str, Any] = {}
    for field in fields(EngineConfig):
        match get_args(hints[field.name]):
            case kind, *limits, Setting(section, description):
                kind = _WITH_UNIT[kind] if field.name.endswith("_bytes") else kind
                limits += [FROM_HOME] * (kind == Path | None)
                default = Field(field.default, description=description)
                added[field.name] = Annotated[kind, *limits, section], default
    return create_model(
        model.__name__, __base__=model, __doc__=model.__doc__, __module__=model.__module__, **added
    )


@_with_engine_settings
class EngineSettings(SettingsModel):
    """Settings of the engine of a model: `adapters`, and those that EngineConfig declares."""

    adapters: Annotated[Adapters, Section.MODEL] = Field(
        {},
        description="LoRA folders of mlx-lm by name; the API serves each as MODEL:ADAPTER.",
    )

    # Without `check_fields` the fields that are added may be validated
    @field_validator("max_model_len", mode="before", check_fields=False)
    @classmethod
    def _auto_is_unset(cls, value: object) -> object:
        return None if value == "auto" else value

    @field_validator("speculate", mode="before", check_fields=False)
    @classmethod
    def _off_without_quotes(cls, value: object) -> object:
        return "off" if value is False else value  # YAML 1.1 reads `off` as false

    @field_validator(
        "kv_events", "kv_events_replay", "ranks_listen", mode="before", check_fields=False
    )
    @classmethod
    def _ports_and_mappings_are_texts(cls, value: object) -> object:
        if isinstance(value, Mapping):  # vLLM's JSON, as YAML has it
            return json.dumps(value)
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _events_can_be_published(self) -> Self:
        engine = self.engine
        try:
            _ = engine.kv_events_config
        except ValueError as error:
            raise PydanticCustomError(
                "kv_events", "kv_events: {problem}", {"problem": str(error)}
            ) from None
        if engine.kv_events_replay is not None and engine.kv_events is None:
            raise PydanticCustomError("kv_events_replay", "kv_events_replay: needs kv_events")
        if engine.kv_events is not None and not engine.prefix_cache:
            raise PydanticCustomError(
                "kv_events", "kv_events: needs the prefix cache, which is turned off"
            )
        return self

    @model_validator(mode="after")
    def _ranks_can_join(self) -> Self:
        engine = self.engine
        try:
            address = engine.ranks_address
        except ValueError as error:
            raise PydanticCustomError(
                "ranks_listen", "ranks_listen: {problem}", {"problem": str(error)}
            ) from None
        if address is not None and engine.ranks == 1:
            raise PydanticCustomError("ranks_listen", "ranks_listen: needs ranks of 2 or more")
        if (address is None) != (engine.ranks_key_file is None):
            raise PydanticCustomError(
                "ranks_key_file", "ranks_key_file: goes with ranks_listen, and that with it"
            )
        return self

    @model_validator(mode="after")
    def _one_purpose(self) -> Self:
        if self.engine.pooling != "auto" and self.engine.reranker != "auto":
            raise PydanticCustomError(
                "reranker", "reranker: a model that reranks does not embed; set no pooling"
            )
        return self

    @model_validator(mode="after")
    def _step_holds_every_running_sequence(self) -> Self:
        if self.engine.step_tokens < self.engine.max_running:
            raise PydanticCustomError(
                "step_tokens",
                "step_tokens: must be at least max_running ({max_running}), because every "
                "running sequence computes a token in a step",
                {"max_running": self.engine.max_running},
            )
        return self

    @property
    def engine(self) -> EngineConfig:
        """The configuration of an engine with these settings. It names no model and has no disk
        cache and no memory limit: `ModelsSettings.config_of` adds these.
        """
        own: dict[str, Any] = {name: getattr(self, name) for name in EngineSettings.model_fields}
        own["adapters"] = tuple(starmap(AdapterConfig, self.adapters.items()))
        return EngineConfig(model="", **own)


class DiskCacheSettings(EngineSettings):
    """The disk cache, which outlives evictions and restarts."""

    disk_cache: Annotated[Path | None, FROM_HOME, Section.DISK_CACHE] = Field(
        None,
        description="Directory on a fast disk for KV that outlives evictions and restarts, "
        "created if missing. Models share it; one daemon uses it at a time.",
    )
    disk_cache_bytes: Annotated[ByteSize, Section.DISK_CACHE] = Field(
        ByteSize(20 * 1024**3),
        ge=LEAST_DISK_BYTES,
        description="Limit of the directory for all models, as du counts.",
    )
    disk_cache_write: Annotated[DiskWrites, Section.DISK_CACHE] = Field(
        _DISK.write,
        description="selective: long prefixes that are shared, idle or about to be evicted; all: "
        "every computed block; exit: nothing before shutdown.",
    )
    disk_cache_daily_bytes: Annotated[ByteSize, Section.DISK_CACHE] = Field(
        ByteSize(100 * 1024**3),
        ge=0,
        description="Most bytes written per day (UTC) for all models, to spare the SSD. 0: no "
        "limit.",
    )
    disk_cache_shutdown_seconds: Annotated[float, Section.DISK_CACHE] = Field(
        _DISK.shutdown_seconds,
        ge=0,
        le=3600,
        description="Time for writing the rest at shutdown, after running requests have ended.",
    )
    disk_cache_salted: Annotated[bool, Section.DISK_CACHE] = Field(
        _DISK.salted,
        description="Also write prompts with a cache_salt, and those of keys that do not share "
        "the cache.",
    )

    @model_validator(mode="after")
    def _there_are_prefixes_to_keep(self) -> Self:
        if self.disk_cache is not None and not self.engine.prefix_cache:
            raise PydanticCustomError(
                "disk_cache",
                "disk_cache: needs the prefix cache, which is turned off (--no-prefix-cache, or "
                "prefix_cache: false)",
            )
        return self

    def disk_cache_config(self) -> DiskCacheConfig | None:
        """The disk cache's share of an engine's configuration; None without a disk cache."""
        if self.disk_cache is None:
            return None
        return DiskCacheConfig(
            directory=self.disk_cache,
            max_bytes=self.disk_cache_bytes,
            write=self.disk_cache_write,
            daily_bytes=self.disk_cache_daily_bytes or None,
            shutdown_seconds=self.disk_cache_shutdown_seconds,
            salted=self.disk_cache_salted,
        )


class ConversationSettings(SettingsModel):
    """Settings of chat prompts and of the parsing of answers."""

    tool_parser: Annotated[str, Section.MODEL] = Field(
        "auto",
        description="Format of tool calls: a name, auto to detect it in the chat template (generic "
        "if it shows none), or none.",
    )
    reasoning_parser: Annotated[str, Section.MODEL] = Field(
        "auto",
        description="Format of reasoning: a name, auto to detect it in the chat template, or none.",
    )
    tool_guides: Annotated[Literal["all", "strict-only"], Section.MODEL] = Field(
        "all",
        description="Tool calls whose names and arguments a grammar enforces: all, or those of "
        "strict functions.",
    )
    loops: Annotated[Literal["end", "allow"], Section.MODEL] = Field(
        "end",
        description="end: a request with tools ends where its answer repeats the same tokens "
        "without end; allow: it does not, unless it has `repetition_detection`.",
    )
    json_schemas: Annotated[Literal["closed", "literal"], Section.MODEL] = Field(
        "closed",
        description="closed: objects with `properties` allow no others unless the schema says so,"
        " as in OpenAI's strict mode; literal: they do.",
    )
    strip_billing_header: Annotated[bool, Section.MODEL] = Field(
        True,
        description="Drop Claude Code's billing header from system prompts; it differs by session"
        " and prevents sharing.",
    )

    warm_prompts: Annotated[Path | None, FROM_HOME, Section.MEMORY] = Field(
        None,
        description="File of prompts to compute after loading while the engine is idle. A list in"
        " JSON or YAML, or JSON lines (.jsonl).",
    )

    @field_validator("warm_prompts")
    @classmethod
    def _file_of_prompts(cls, path: Path | None) -> Path | None:
        try:
            if path is not None:
                read_prompts(path)
        except PromptFileError as error:
            raise PydanticCustomError("file", "{problem}", {"problem": str(error)}) from None
        return path

    @field_validator("tool_parser", "reasoning_parser")
    @classmethod
    def _known_parser(cls, name: str, info: ValidationInfo) -> str:
        known = TOOL_FORMATS if info.field_name == "tool_parser" else REASONING_FORMATS
        if name not in {"auto", "none", *known}:
            names = ", ".join(("auto", "none", *sorted(known)))
            raise PydanticCustomError("parser", "must be one of {names}", {"names": names})
        return name

    @field_validator("reasoning_parser")
    @classmethod
    def _goes_with_tool_parser(cls, name: str, info: ValidationInfo) -> str:
        tools = info.data.get("tool_parser", "none")
        if not {tools, name} & {"auto", "none"} and not go_together(tools, name):
            message = "cannot go together with the tool_parser {tools}"
            raise PydanticCustomError("parser", message, {"tools": tools})
        return name


class ResidencySettings(SettingsModel):
    """When a model is in memory."""

    ttl_seconds: Annotated[float | None, Section.MEMORY] = Field(
        None,
        ge=0,
        description="Unload the model after this many idle seconds; a request's `keep_alive` "
        "overrides it, and the latest end counts. Unset: never.",
    )
    pinned: Annotated[bool, Section.MEMORY] = Field(
        False,
        description="Never unload this model; restart it if its process dies.",
    )
    preload: Annotated[bool, Section.MEMORY] = Field(
        True,
        description="Load this model at start if it fits, else on first use.",
    )


class ModelSettings(ConversationSettings, EngineSettings, ResidencySettings):
    """The settings of one model: those of its entry in `models`, else those for all."""

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
        return self.model or DEMO_NAME


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


class PoolSettings(SettingsModel):
    """The models, and the memory that they share."""

    model: Annotated[Texts, Section.MODEL] = Field(
        (),
        description=f"{MODEL} Several are loaded when requests name them. Unset: smollm2, "
        "minilm and rootstock-demo.",
    )
    served_model_name: Annotated[Texts, Section.MODEL] = Field((), description=NAMES)
    models: Annotated[
        tuple[ModelSettings, ...], NoDecode, BeforeValidator(from_json), Section.MODEL
    ] = Field(
        (),
        description="In YAML: more models, each with a `model` and its own settings.",
    )
    on_demand: Annotated[bool, Section.MEMORY] = Field(
        False, description="Let requests name every model in the Hugging Face cache."
    )
    memory_budget: Annotated[ByteSize | None, Section.MEMORY] = Field(
        None,
        gt=0,
        description="Memory limit of all models together, such as 24GiB. Unset: none for one "
        "model, 80% of the memory free at start for several.",
    )
    load_timeout_seconds: Annotated[float, Section.MEMORY] = Field(
        600.0, gt=0, description="How long a request waits for its model to load."
    )


# Of several bases the last has the first fields
class ModelsSettings(ConversationSettings, DiskCacheSettings, ResidencySettings, PoolSettings):
    """The settings of all models: shared ones, and those of the entries of `models`."""

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

    @property
    def names_models(self) -> bool:
        """Whether any model is named."""
        return bool(self.model or self.models)

    def with_default_models(self) -> Self:
        """These settings, which name no model, for SmolLM2. MiniLM and the embedded model, with
        default settings, are fetched and loaded when a request names them.
        """
        first = {"model": SMOLLM2_NAME, "served_model_name": self.served_model_name}
        others = [
            ModelSettings(model=name).model_dump(exclude={*ResidencySettings.model_fields})
            for name in (MINILM_NAME, DEMO_NAME)
        ]
        models = [first, *(other | {"preload": False} for other in others)]
        entries = tuple(map(ModelSettings.model_validate, models))
        return self.model_copy(update={"models": entries, "served_model_name": ()})

    def with_embedded_model(self) -> Self:
        """These settings, which name no model, for the embedded model alone."""
        return self.model_copy(update={"model": (DEMO_NAME,)})

    def each_model(self) -> tuple[ModelSettings, ...]:
        """The settings of `model` and of `models`, in this order; of the embedded model if there
        are none.
        """
        return tuple(map(self.of_model, self._given_to_each()))

    def of_model(self, given: dict[str, Any]) -> ModelSettings:
        """One model's settings: its own, and the common ones for the rest."""
        shared = set(ModelSettings.model_fields) - {"model", "served_model_name"}
        return ModelSettings.model_validate(self.model_dump(include=shared) | given)

    def config_of(self, model: ModelSettings, memory_bytes: int | None = None) -> EngineConfig:
        """An engine's configuration. It uses at most `memory_bytes`; None: the free memory. A model
        without a prefix cache has no prefixes to keep on disk.
        """
        disk = self.disk_cache_config() if model.engine.prefix_cache else None
        return replace(model.engine, model=model.model, memory_bytes=memory_bytes, disk=disk)

    def _given_to_each(self) -> list[dict[str, Any]]:
        """The settings given for single models, in the order of `each_model`."""
        names = self.model or (() if self.models else ("",))
        given: list[dict[str, Any]] = [{"model": name} for name in names]
        given += [entry.model_dump(exclude_unset=True) for entry in self.models]
        if len(given) == 1 and self.served_model_name:
            given[0]["served_model_name"] = self.served_model_name
        return given

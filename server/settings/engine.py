"""How the engine runs a model."""

from itertools import starmap
from typing import Literal, Self

from pydantic import BaseModel, ByteSize, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from engine.values.settings import AdapterConfig, DiskCacheConfig, EngineConfig
from server.settings.adapters import Adapters


class EngineSettings(BaseModel):
    adapters: Adapters = Field(
        {},
        description="Adapters of the model by name: folders with a LoRA as mlx-lm writes them. In "
        "the API each is a model, which has the model's name, a colon and its own.",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Where a request is silent: auto samples as the model's generation_config.json "
        "says, none from the model's distribution as it is.",
    )
    kv_cache_bytes: ByteSize | None = Field(
        None,
        gt=0,
        description="Size of the arena that holds the KV cache, such as 8GiB: allocated at start, "
        "never grows. Unset: a share of what the machine has left.",
    )
    state_cache_bytes: ByteSize | None = Field(
        None,
        ge=0,
        description="For saved states of recurrent layers. Unset: a quarter of the arena, if as "
        "much is useful.",
    )
    block_size: int = Field(32, ge=1, le=1024, description="Tokens in one block of the KV cache.")
    max_running: int = Field(
        32, ge=1, le=1024, description="Sequences that are computed together in one step."
    )
    max_waiting: int = Field(
        1024,
        ge=1,
        le=1_000_000,
        description="Sequences that may queue before requests are refused; of one client at most "
        "as many as places are free.",
    )
    step_tokens: int = Field(
        512,
        ge=1,
        le=1_000_000,
        description="Tokens computed in one step at most.",
    )
    max_prompt_share: float = Field(
        0.75,
        ge=0,
        le=1,
        description="Beside answers that are being written, the share of a step's time that "
        "prompts may take: with 0.75 a step is at most four times as long as the answers alone "
        "would make it. Less makes steadier streams, more lets prompts be through sooner. 1: "
        "step_tokens alone limits.",
    )
    prefix_cache: bool = Field(
        True, description="Share KV between prompts that begin alike, and between turns."
    )
    speculate: Literal["auto", "off"] = Field(
        "auto",
        description="Draft tokens from what is known already, and compute several of an answer in "
        "one step where that is faster; auto decides by what it costs and how often drafts were "
        "right. No answer changes.",
    )
    decode: Literal["auto", "eager"] = Field(
        "auto",
        description="auto compiles steps in which answers are written and nothing else happens, "
        "where that is found to be faster when the model is loaded; eager never does.",
    )
    attention: Literal["auto", "gather", "cascade"] = Field(
        "auto",
        description="How attention reads the blocks; auto is cascade on a CPU, which alone "
        "has it, else gather.",
    )

    pooling: Literal["auto", "last", "mean", "first"] = Field(
        "auto",
        description="Embeddings are made of the hidden state of a text's last token, of its first, "
        "or of the mean of all; auto is what the checkpoint's files of sentence-transformers say, "
        "without which a model does not embed.",
    )
    reranker: Literal["auto", "yes-no"] = Field(
        "auto",
        description="yes-no serves a generator as a reranker, by the logits of these two words, as "
        "Qwen3-Reranker; auto reranks with checkpoints for sequence classification alone.",
    )

    @field_validator("speculate", mode="before")
    @classmethod
    def _off_without_quotes(cls, value: object) -> object:
        return "off" if value is False else value  # YAML 1.1 reads `off` as false

    @model_validator(mode="after")
    def _one_purpose(self) -> Self:
        if self.pooling != "auto" and self.reranker != "auto":
            raise PydanticCustomError(
                "reranker", "reranker: a model that reranks does not embed; set no pooling"
            )
        return self

    @model_validator(mode="after")
    def _step_holds_every_running_sequence(self) -> Self:
        if self.step_tokens < self.max_running:
            raise PydanticCustomError(
                "step_tokens",
                "step_tokens: must be at least max_running ({max_running}), because every "
                "running sequence computes a token in a step",
                {"max_running": self.max_running},
            )
        return self

    def engine_config(self, model: str, disk: DiskCacheConfig | None) -> EngineConfig:
        """The engine's share of the settings, for one model."""
        return EngineConfig(
            model=model,
            disk=disk,
            kv_cache_bytes=self.kv_cache_bytes,
            block_size=self.block_size,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            step_tokens=self.step_tokens,
            max_prompt_share=self.max_prompt_share,
            prefix_cache=self.prefix_cache,
            speculate=self.speculate,
            decode=self.decode,
            attention=self.attention,
            state_cache_bytes=self.state_cache_bytes,
            generation_config=self.generation_config,
            adapters=tuple(starmap(AdapterConfig, self.adapters.items())),
            pooling=self.pooling,
            reranker=self.reranker,
        )

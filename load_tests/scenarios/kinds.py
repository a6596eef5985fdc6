"""What the files in `yaml/` say."""

from importlib import resources
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Count = Annotated[int, Field(ge=1)]

QUICK_TOKENS = 8
QUICK_IMAGE_TOKENS = 100


class _Common(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    description: str
    checkpoint: str = "qwen3"  # a random one's shape, a directory, or a model's name
    beside: tuple[str, ...] = ()  # flags of the Rootstock to compare with; none: other servers
    others: tuple[Literal["mlx_lm", "vllm_mlx", "mlx_vlm"], ...] = ("mlx_lm", "vllm_mlx")
    listen_queue: Count = 5  # connections that may wait for mlx_lm.server; 5 is its own number


class Load(_Common):
    """Conversations at a given concurrency."""

    kind: Literal["load"] = "load"
    concurrency: Count  # conversations open at a time
    conversations: Count
    turns: Count = 1
    waves: Count = 1  # the same conversations again, each wave after the last one's end
    system_prompts: Annotated[int, Field(ge=0)] = 0  # dealt to the conversations in turn
    system_words: Annotated[int, Field(ge=0)] = 0
    image_sets: Annotated[int, Field(ge=0)] = 0  # dealt to the conversations in turn
    images: Count = 1  # of a set, which the first user message carries
    image_tokens: Count = 1000  # of each image
    user_words: Count
    output_tokens: Count

    def quick(self) -> Self:
        """The same with hardly any work, for trying it."""
        work = {
            "conversations": self.concurrency,
            "turns": min(self.turns, 2),
            "output_tokens": min(self.output_tokens, QUICK_TOKENS),
            "image_tokens": min(self.image_tokens, QUICK_IMAGE_TOKENS),
        }
        return self.model_copy(update=work)


Part = Literal["docstring", "source"]


class Text(_Common):
    """Conversations of a real model about texts of Python's standard library: one for each of
    `openings` with each of `texts`. Answers may end early.
    """

    kind: Literal["text"]
    checkpoint: str = "smollm2"
    concurrency: Count
    texts: tuple[str, ...]  # dotted names
    part: Part = "docstring"  # of each that is asked about
    openings: tuple[str, ...]  # first messages, where {text} and {name} are filled in
    turns: tuple[str, ...] = ()  # the messages after the first
    system: str = ""  # where {manual} is filled in
    manual: tuple[str, ...] = ()  # dotted names, whose docstrings make the manual
    waves: Count = 1  # the same conversations again, each wave after the last one's end
    output_tokens: Count  # at most
    temperature: Annotated[float, Field(ge=0)] = 0
    seed: int | None = None

    def quick(self) -> Self:
        """The scenario with half of its texts and shorter answers, for a quick trial."""
        work = {
            "texts": self.texts[: (len(self.texts) + 1) // 2],
            "output_tokens": (self.output_tokens + 1) // 2,
        }
        return self.model_copy(update=work)


class Arrival(_Common):
    """A long prompt arrives while others are being answered, and once while nobody is."""

    kind: Literal["arrival"]
    streams: Count  # answers under way
    stream_words: Count  # of their prompts
    prompt_words: Count  # of the long one
    images: Annotated[int, Field(ge=0)] = 0  # of the long one
    image_tokens: Count = 1000  # of each image
    output_tokens: Count  # of its answer

    def quick(self) -> Self:
        """The same with a shorter prompt, for trying it."""
        work = {
            "prompt_words": (self.prompt_words + 3) // 4,
            "image_tokens": min(self.image_tokens, QUICK_IMAGE_TOKENS),
        }
        return self.model_copy(update=work)


class _Disk(_Common):
    """Ours alone, with a disk cache."""

    flags: tuple[str, ...]
    output_tokens: Count


class Restart(_Disk):
    """What has been answered is asked again, by the same daemon and by the next one."""

    kind: Literal["restart"]
    prompt_words: Count
    system_words: Count
    turns: Count  # of the conversation, which has `prompt_words` in all
    idle_seconds: Annotated[float, Field(ge=0)]  # before a kill

    def quick(self) -> Self:
        """The same with shorter prompts, for trying it."""
        work = {"prompt_words": self.prompt_words // 4, "system_words": self.system_words // 2}
        return self.model_copy(update=work)


class Comeback(_Disk):
    """Long prompts come back to the next daemon: alone, beside streams, and as a crowd."""

    kind: Literal["comeback"]
    prompt_words: tuple[Count, ...]
    token_bytes: Count  # of the checkpoint's KV
    streams: Annotated[int, Field(ge=0)]  # answers under way
    stream_words: Count  # of their prompts
    crowd: Count  # prompts at once
    crowd_words: Count
    idle_seconds: Annotated[float, Field(ge=0)]  # before a kill

    def quick(self) -> Self:
        """The same with shorter prompts, for trying it."""
        work = {
            "prompt_words": tuple(words // 8 for words in self.prompt_words),
            "crowd_words": self.crowd_words // 4,
        }
        return self.model_copy(update=work)


Playable = Load | Text | Arrival
"""Needs no more than a server."""

Restarting = Restart | Comeback
"""Starts servers of its own."""

Scenario = Annotated[Playable | Restarting, Field(discriminator="kind")]
_SCENARIO: TypeAdapter[Playable | Restarting] = TypeAdapter(Scenario)
_FILES = resources.files("load_tests.scenarios") / "yaml"


def scenario_names() -> list[str]:
    """Names of the scenarios that come with the package, sorted."""
    names = (file.name for file in _FILES.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def text_scenario_names() -> list[str]:
    """Names of the scenarios with real texts for a real model, sorted."""
    return [name for name in scenario_names() if isinstance(load_scenario(name), Text)]


def load_scenario(name: str) -> Playable | Restarting:
    """Read `yaml/<name>.yaml`, which may be `like` another one but for what it says itself.

    Raises FileNotFoundError, pydantic.ValidationError.
    """
    return _SCENARIO.validate_python(_fields(name))


def _fields(name: str) -> dict[str, Any]:
    own = yaml.safe_load((_FILES / f"{name}.yaml").read_text())
    return {**(_fields(own.pop("like")) if "like" in own else {}), **own}

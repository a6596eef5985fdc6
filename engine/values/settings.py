"""The engine's settings. Frozen values."""

import json
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from kvstore.disk.types import LEAST_BYTES

DEMO_NAME = "rootstock-demo"
"""The name of the embedded model."""

SMOLLM2_NAME = "smollm2"
"""The name of a small real model, which is fetched as a package and converted once."""

MINILM_NAME = "minilm"
"""The name of a small real embedder, which is fetched as a package."""

LEAST_DISK_BYTES = LEAST_BYTES
"""The fewest bytes of a disk cache, whose index alone may need a few MiB."""


class KVFormat(StrEnum):
    """How K and V are stored."""

    AUTO = "auto"  # full
    FULL = "full"  # as the model computes them
    F16 = "f16"  # float16, where the model computes in float32
    BF16 = "bf16"  # bfloat16, where the model computes in float32
    Q8 = "q8"  # 8 bits for each number
    K8V4 = "k8v4"  # 8 bits for each number of K, 4 for each of V


class StateFormat(StrEnum):
    """How recurrent states are saved, in memory and on disk."""

    AUTO = "auto"  # full
    FULL = "full"  # as the model computes them
    F16 = "f16"  # float16, where the model computes in float32
    BF16 = "bf16"  # bfloat16, where the model computes in float32


class DiskWrites(StrEnum):
    """The blocks that are written to disk."""

    SELECTIVE = "selective"  # long prefixes that are shared, idle or about to be evicted
    ALL = "all"  # every block, as soon as it is computed
    EXIT = "exit"  # nothing before shutdown


@dataclass(frozen=True, slots=True)
class DiskCacheConfig:
    """A folder for KV that the arena evicts. The engines of one daemon share it, and its limits."""

    directory: Path
    max_bytes: int  # of all files together; at least LEAST_DISK_BYTES
    write: DiskWrites = DiskWrites.SELECTIVE
    daily_bytes: int | None = None  # the most that is written in a day of UTC; None: no limit
    shutdown_seconds: float = 10.0  # for writing what is still to be, at the end
    salted: bool = False  # write prompts that have a cache_salt, too
    daemon: str = ""  # whose engines share the folder; without a name this one is alone


LEAST_HWM = 100
"""A subscriber that reads at once must lose none of the batches that are sent together to it."""


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """How KV events are published. The fields are those of vLLM's `--kv-events-config`."""

    endpoint: str
    replay_endpoint: str = ""  # "": nothing is sent again on request
    topic: str = ""
    buffer_steps: int = 10_000  # batches that are kept for being sent again
    hwm: int = 10_000  # batches that wait for a slow subscriber, beyond which it loses some

    @classmethod
    def read(cls, events: str, replay: str | None) -> "KVEventsConfig | None":
        """The configuration of the settings `kv_events` and `kv_events_replay`. None if vLLM's
        JSON turns events off. Raises ValueError.
        """
        if not events.lstrip().startswith("{"):
            return cls(_endpoint(events), _endpoint(replay) if replay else "")
        given = json.loads(events)
        is_on = given.pop("enable_kv_cache_events", False)
        publisher = given.pop("publisher", None) or "zmq"
        given.pop("max_queue_size", None)  # as many blocks as the arena has
        if unknown := given.keys() - cls.__dataclass_fields__.keys():
            raise ValueError(f"has no field {min(unknown)}")
        if publisher not in {"zmq", "null"}:
            raise ValueError("knows the publishers zmq and null")
        for name, least in ("buffer_steps", 1), ("hwm", LEAST_HWM):
            number = given.get(name, least)
            if not isinstance(number, int) or not least <= number < 2**31:
                raise ValueError(f"needs a number as its {name}")
        if not isinstance(given.setdefault("topic", ""), str):
            raise ValueError("needs a text as its topic")
        if not is_on or publisher == "null":
            return None
        given["endpoint"] = _endpoint(given.get("endpoint", "5557"))
        replay = replay or given.get("replay_endpoint")
        given["replay_endpoint"] = _endpoint(replay) if replay else ""
        return cls(**given)


def _endpoint(text: object) -> str:
    """An address of ZeroMQ; that of a port alone is of this machine. Raises ValueError."""
    given = str(text)
    host, _, port = given.removeprefix("tcp://").rpartition(":")
    host = {"": "127.0.0.1", "localhost": "127.0.0.1"}.get(host, host)
    if host == "*":
        raise ValueError("must name its address: prompts are sent in clear; 0.0.0.0 is all")
    try:
        address = ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        address = None
    if address is None or not (port.isdecimal() and int(port) < 65536):
        raise ValueError("must be a port or an address such as tcp://127.0.0.1:5557")
    return f"tcp://[{address}]:{port}" if address.version == 6 else f"tcp://{address}:{port}"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A LoRA of the model, as mlx-lm writes them, under a name that requests may ask for."""

    name: str
    directory: Path


class Section(StrEnum):
    """A section of `rootstock serve --help`, in the order in which they are shown."""

    MODEL = "Model"
    MEMORY = "Memory"
    DISK_CACHE = "Disk cache"
    NETWORK = "Network"
    KEYS = "Keys"
    LIMITS = "Limits"
    COMPUTING = "Computing"


@dataclass(frozen=True, slots=True)
class Setting:
    """Makes a field of EngineConfig a setting of the server, with a flag, a variable and a name in
    YAML. It stands in the field's annotation, next to the limits of its value.
    """

    section: Section
    description: str


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that configures an engine. The server validates the fields that have a Setting, and
    computes the others.
    """

    model: str  # a directory, a Hugging Face repository, or "" for the embedded default
    memory_bytes: int | None = None  # for all that it takes; None: what the machine has left
    disk: DiskCacheConfig | None = None
    adapters: tuple[AdapterConfig, ...] = ()  # no two of one name

    draft_model: Annotated[
        str | None,
        Setting(
            Section.MODEL,
            "A smaller model with the same tokenizer, which drafts tokens that the model verifies: "
            "a directory or a Hugging Face repository. Answers do not change.",
        ),
    ] = None
    generation_config: Annotated[
        Literal["auto", "none"],
        Setting(
            Section.MODEL,
            "Sampling defaults: auto uses the model's generation_config.json, none temperature 1.",
        ),
    ] = "auto"
    kv_cache_bytes: Annotated[
        int | None,
        Gt(0),
        Setting(
            Section.MEMORY,
            "Size of the KV arena, such as 8GiB, allocated at start. Unset: a share of the free "
            "memory.",
        ),
    ] = None
    kv_format: Annotated[
        KVFormat,
        Setting(
            Section.MEMORY,
            "How K and V are stored. full, which auto is: as the model computes them. q8: 8 bits a "
            "number, for nearly twice the tokens of half precision. k8v4: 8 bits for K and 4 for "
            "V. f16, bf16: half precision, where the model computes in float32. What a format "
            "changes is measured at load, and too much is refused.",
        ),
    ] = KVFormat.AUTO
    state_format: Annotated[
        StateFormat,
        Setting(
            Section.MEMORY,
            "How states of recurrent layers are saved. full, which auto is: as the model computes "
            "them. f16, bf16: in half precision, for twice as many; prompts are then resumed from "
            "every 512th token only. What that changes is measured at load, and too much is "
            "refused.",
        ),
    ] = StateFormat.AUTO
    state_cache_bytes: Annotated[
        int | None,
        Ge(0),
        Setting(
            Section.MEMORY,
            "Memory for saved states of recurrent layers. Unset: a quarter of the arena, or what "
            "is useful.",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Ge(1),
        Setting(
            Section.MODEL,
            "Most tokens of prompt and answer. Unset, or auto: the model's context, or what fits "
            "into memory.",
        ),
    ] = None
    block_size: Annotated[
        int,
        Ge(1),
        Le(1024),
        Setting(Section.COMPUTING, "Tokens in one block of the KV cache."),
    ] = 32
    max_running: Annotated[
        int,
        Ge(1),
        Le(1024),
        Setting(Section.LIMITS, "Sequences computed together in one step."),
    ] = 32
    max_waiting: Annotated[
        int,
        Ge(1),
        Le(1_000_000),
        Setting(
            Section.LIMITS,
            "Queue length in sequences, beyond which requests get a 429. One client may queue as "
            "many as there are free places.",
        ),
    ] = 1024
    step_tokens: Annotated[
        int,
        Ge(1),
        Le(1_000_000),
        Setting(Section.COMPUTING, "Most tokens computed in one step."),
    ] = 512
    max_prompt_share: Annotated[
        float,
        Ge(0),
        Le(1),
        Setting(
            Section.COMPUTING,
            "Share of a step's time that prompts may take next to decodes; 0.75 makes a step at "
            "most four times as long. Smaller: steadier streams. 1: only step_tokens limits.",
        ),
    ] = 0.75
    prefix_cache: Annotated[
        bool,
        Setting(
            Section.MEMORY, "Share KV between prompts with a common prefix, and between turns."
        ),
    ] = True
    speculate: Annotated[
        Literal["auto", "off"],
        Setting(
            Section.COMPUTING,
            "Draft tokens and verify several in one step where that is predicted to be faster. "
            "Answers do not change.",
        ),
    ] = "auto"
    decode: Annotated[
        Literal["auto", "eager"],
        Setting(
            Section.COMPUTING,
            "auto compiles decode steps if that is faster when measured at load; eager never "
            "compiles.",
        ),
    ] = "auto"
    kv_events: Annotated[
        str | None,
        Setting(
            Section.NETWORK,
            "Publish which blocks are cached, with their tokens, for routers: a port, 0 for a free "
            "one, or an address such as tcp://127.0.0.1:5557, or vLLM's JSON.",
        ),
    ] = None
    kv_events_replay: Annotated[
        str | None,
        Setting(
            Section.NETWORK,
            "Port or address at which routers request events again that they have lost.",
        ),
    ] = None
    ranks: Annotated[
        int,
        Ge(1),
        Le(64),
        Setting(
            Section.COMPUTING,
            "Processes that compute the model together, each a part of every layer, on this "
            "machine or, with ranks_listen, on several. Their number must divide the model's "
            "heads.",
        ),
    ] = 1
    attention: Annotated[
        Literal["auto", "gather", "cascade", "paged"],
        Setting(
            Section.COMPUTING,
            "How attention reads the blocks; auto is cascade on a CPU, and on a GPU what was the "
            "fastest when compared at the first load. paged reads them in place on a GPU, and is "
            "slow on a CPU.",
        ),
    ] = "auto"
    ranks_listen: Annotated[
        str | None,
        Setting(
            Section.NETWORK,
            "Address, such as 192.168.7.1:5700, at which `rootstock rank` of other machines joins: "
            "all ranks but one. Unset: all ranks are processes of this machine.",
        ),
    ] = None
    ranks_key_file: Annotated[
        Path | None,
        Setting(
            Section.NETWORK,
            "File of the key that ranks of other machines must have, too: 32 bytes or more, as "
            "`openssl rand -hex 32` writes them. Only you may be able to read it.",
        ),
    ] = None
    pooling: Annotated[
        Literal["auto", "last", "mean", "first"],
        Setting(
            Section.MODEL,
            "Which hidden states form an embedding: the last token's, the first's or the mean; "
            "auto follows the checkpoint's sentence-transformers files, without which a model does "
            "not embed.",
        ),
    ] = "auto"
    reranker: Annotated[
        Literal["auto", "yes-no"],
        Setting(
            Section.MODEL,
            "yes-no serves a generator as a reranker by the logits of these two words; auto "
            "reranks with sequence-classification checkpoints only.",
        ),
    ] = "auto"

    @property
    def draft_model_in_use(self) -> str | None:
        """The draft model; None also where nothing is drafted."""
        return self.draft_model if self.speculate == "auto" else None

    @property
    def kv_events_config(self) -> KVEventsConfig | None:
        """How KV events are published; None if they are not. Raises ValueError."""
        if self.kv_events is None:
            return None
        return KVEventsConfig.read(self.kv_events, self.kv_events_replay)

    @property
    def local_ranks(self) -> int:
        """How many of the ranks share this machine's memory."""
        return self.ranks if self.ranks_listen is None else 1

    @property
    def ranks_address(self) -> tuple[str, int] | None:
        """Where ranks of other machines join; None: all are of this machine. Raises ValueError."""
        if self.ranks_listen is None:
            return None
        host, _, port = _endpoint(self.ranks_listen).removeprefix("tcp://").rpartition(":")
        if "[" in host:
            raise ValueError("must be of IPv4, by which MLX connects ranks")
        if not int(port):
            raise ValueError("must name the port, for ranks to join there")
        return host, int(port)

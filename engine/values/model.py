"""The model that is served: its card, its tokenizer, its replays. Frozen values."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Annotated, NamedTuple, Protocol

from annotated_types import Ge, Le

from engine.values.images import ImageInput
from engine.values.request import Pooling

Temperature = Annotated[float, Ge(0), Le(2)]
TopP = Annotated[float, Ge(0), Le(1)]
TopK = Annotated[int, Ge(-1), Le(2**31 - 1)]
MinP = Annotated[float, Ge(0), Le(1)]
RepetitionPenalty = Annotated[float, Ge(0.01), Le(100)]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values of omitted sampling fields. The defaults of this class leave the model's
    distribution unchanged.
    """

    temperature: Temperature = 1.0  # 0 is greedy
    top_p: TopP = 1.0  # 0 is greedy
    top_k: TopK = 0  # 0 and -1 are off
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0


@dataclass(frozen=True, slots=True)
class TemplateKind:
    """The way in which mlx-lm renders a checkpoint's chat template."""

    module: str = ""  # of mlx_lm.chat_templates; "": the tokenizer's own, in Jinja
    thinking_argument: str = "enable_thinking"
    thinks: bool = False  # unless a conversation says otherwise
    source: str = ""  # in Jinja, in place of the tokenizer's own


class Task(StrEnum):
    """A task that a model is served for."""

    GENERATE = "generate"
    EMBED = "embed"
    RERANK = "rerank"


@dataclass(frozen=True, slots=True)
class Embedder:
    """Turns the hidden states of a text into its vector."""

    pooling: Pooling
    dimensions: int
    normalized: bool = True  # to a length of 1
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: stands before a text
    default_prompt: str = ""  # the name of the one where none is asked for


@dataclass(frozen=True, slots=True)
class Reranker:
    """Turns a query and a document into a score. The number that is made of the last token's hidden
    state goes through a sigmoid, unless the checkpoint says not.
    """

    has_sigmoid: bool = True
    is_templated: bool = True  # else the tokenizer joins the two texts


@dataclass(frozen=True, slots=True)
class KVEventSource:
    """The addresses at which an engine publishes KV events. Ports are those in use."""

    endpoint: str
    replay_endpoint: str | None
    topic: str


class Place(Enum):
    """A place where users see a fact about a model, in addition to `GET /admin/daemon`."""

    MODELS = "the JSON of `GET /v1/models`"
    METRIC = "the labels of the metric `rootstock_model_info`"


@dataclass(frozen=True, slots=True)
class Fact:
    """How users see a field of `ModelCard`: stands in the field's annotation.

    `label` names a line of the dashboard and of `rootstock doctor`, as it is written within a
    sentence; a fact without one has no line of its own.
    """

    description: str
    label: str = ""
    places: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The facts about a loaded model that the server needs. Users see those with a `Fact`."""

    name: Annotated[str, Fact("The directory or repository that it came from.")]
    fingerprint: Annotated[
        str,
        Fact(
            "Short digest of config and weights' identity: `system_fingerprint`.",
            places=(Place.METRIC,),
        ),
    ]
    vocab_size: int
    model_context_tokens: Annotated[
        int | None, Fact("The longest context that the checkpoint supports, if its files state it.")
    ]
    max_context_tokens: Annotated[
        int,
        Fact("The model's context, or `max_model_len` or what fits into memory if that is less."),
    ]
    eos_token_ids: frozenset[int]
    kv_bytes_per_token: Annotated[int, Fact("Bytes of the KV cache that a token takes.")]
    arena_tokens: int  # what the whole arena holds
    block_size: int
    device: Annotated[str, Fact("`cpu` or `gpu`, with its name.", places=(Place.METRIC,))]
    dtype: Annotated[str, Fact("The types of K and V as computed.", places=(Place.METRIC,))]
    blas: Annotated[str, Fact("Which BLAS runs, for Linux CPUs; empty elsewhere.")]
    sampling: Annotated[SamplingDefaults, Fact("The values of omitted sampling fields.")] = (
        SamplingDefaults()
    )
    checkpoint: str = ""  # its directory, with the tokenizer
    template: TemplateKind = TemplateKind()
    adapters: Mapping[str, str] = field(default_factory=dict)  # a fingerprint of each, by name
    generates: bool = True
    embedder: Embedder | None = None
    reranker: Reranker | None = None
    kv_format: Annotated[
        str,
        Fact(
            "How K and V are stored, and how many layers are not stored so; empty for an encoder.",
            places=(Place.MODELS, Place.METRIC),
        ),
    ] = "full"
    kv_divergence: Annotated[
        float | None,
        Fact(
            "What `kv_format` changes: the KL divergence of predictions from those in full "
            "precision, in nats for each token, on a text at load. Null where K and V are stored "
            "as the model computes them."
        ),
    ] = None
    state_format: Annotated[
        str,
        Fact(
            "How recurrent states are saved; empty for a model without.",
            label="saved states",
            places=(Place.MODELS,),
        ),
    ] = ""
    state_divergence: Annotated[
        float | None,
        Fact("What `state_format` changes, measured as `kv_divergence`. Null for `full`."),
    ] = None
    license: Annotated[
        str,
        Fact(
            "The licence of the weights, by the checkpoint's README.md; empty if it names none.",
            label="licence of the weights",
            places=(Place.MODELS,),
        ),
    ] = ""
    batching: Annotated[
        str, Fact("How rows share forwards, and why not in a better way.", label="batching")
    ] = ""
    draft_model: Annotated[
        str,
        Fact(
            "The draft model and its size; empty if there is none.",
            label="draft model",
            places=(Place.MODELS,),
        ),
    ] = ""
    kv_events: KVEventSource | None = None
    ranks: Annotated[
        str,
        Fact(
            "What each of several ranks takes, and which of them limits the KV cache; empty for "
            "one.",
            label="ranks",
            places=(Place.MODELS,),
        ),
    ] = ""
    attention: Annotated[
        str,
        Fact(
            "The attentions that serve; of several, each where it was the fastest.",
            places=(Place.MODELS, Place.METRIC),
        ),
    ] = ""
    attention_choice: Annotated[
        str,
        Fact(
            "Which attention reads the blocks for how many rows and keys, and why no other.",
            label="attention",
            places=(Place.MODELS,),
        ),
    ] = ""
    images: ImageInput | None = None  # None: it takes none
    images_refused: Annotated[
        str,
        Fact(
            "Why the model takes no images although its checkpoint has a vision tower; else empty.",
            label="no images",
            places=(Place.MODELS,),
        ),
    ] = ""
    slowdowns: tuple[str, ...] = ()
    """Reasons why steps are slower or reuse less than they could: sentences, each with a remedy."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that the model is served for."""
        served = (
            (Task.GENERATE, self.generates),
            (Task.EMBED, self.embedder is not None),
            (Task.RERANK, self.reranker is not None),
        )
        return tuple(task for task, is_served in served if is_served)

    @property
    def max_sequence_tokens(self) -> int:
        """The most tokens of one sequence, prompt and answer."""
        return min(self.max_context_tokens, self.arena_tokens)


def facts_of(card: type[ModelCard], place: Place | None = None) -> dict[str, Fact]:
    """The facts among a card's fields, by the names of the fields: all, or those of a place."""
    return {
        each.name: fact
        for each in fields(card)
        for fact in getattr(each.type, "__metadata__", ())
        if isinstance(fact, Fact) and (place is None or place in fact.places)
    }


@dataclass(frozen=True, slots=True)
class Replay:
    """An answer as it was generated, for when it comes back in a conversation.

    `opened` + the text of `tokens` is `opened` + `thinking` + content and calls.
    """

    tokens: tuple[int, ...]  # without the stop token
    opened: str = ""  # of the reasoning, by the prompt that was answered: "<think>\n"
    thinking: str = ""  # the text up to the end of the reasoning, markers included
    reasoning: str = ""  # what of it the client was sent as reasoning


NO_REPLAYS: Mapping[int, Replay] = MappingProxyType({})


class RenderedChat(NamedTuple):
    """A conversation with images as token ids. `positions` are those of the first token of each
    image, in order.
    """

    tokens: list[int]
    positions: list[int]


class Tokenizer(Protocol):
    """Text to token ids and back. Safe to call from several threads, and lets others run.

    `encode` and `apply_chat_template` raise PromptTooLong for texts that are far beyond what a
    sequence may have; others may still have a few tokens more.
    """

    @property
    def chat_template(self) -> str:
        """The source of the chat template; "" if the model has none."""
        ...

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Tokens that are more than pieces of text: markers, beginnings and ends. Text to id."""
        ...

    @property
    def special_tokens(self) -> Collection[str]:
        """The added tokens that are not text: answers omit them unless requested."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Control tokens in it count as such."""
        ...

    def encode_beginning(
        self, text: str, most_tokens: int, *, add_special_tokens: bool
    ) -> list[int]:
        """The token ids of a text, cut at its end to the number that is allowed together with the
        special tokens around it. The text may be of any length.
        """
        ...

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts, joined as the tokenizer joins a pair."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special tokens included."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, half characters included."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: object,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        Control tokens count as such where the template wrote them. In `messages` and
        `template_arguments` they are text.

        `replays` are by the index of their message, which must say the same. Their tokens stand
        where the template writes the message with all its reasoning; elsewhere it is rendered as
        any other.

        Raises ValueError when the model has no template or the template refuses the messages.
        """
        ...

    @property
    def image_stand_in(self) -> str:
        """The text that stands for an image in a message of `render_with_images`. No client can
        write it: it differs from process to process.
        """
        ...

    def render_with_images(
        self,
        messages: Sequence[Mapping[str, object]],
        images: Sequence[Sequence[int]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: object,
    ) -> RenderedChat:
        """Token ids of a conversation with images, as `apply_chat_template` makes them. In order,
        the tokens in `images` take the place of each image: of the placeholders that the template
        writes, and of each `image_stand_in` in the messages.

        Raises ValueError also where the template writes another number of images.
        """
        ...

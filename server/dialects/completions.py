"""`POST /v1/completions`, whole and streamed, their log-probabilities, and its `/render`."""

import codecs
from collections.abc import Sequence
from itertools import islice
from math import inf
from statistics import fmean
from sys import getsizeof
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field, PlainValidator, ValidationInfo, field_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError, to_json
from starlette.responses import Response
from typing_extensions import TypedDict

from engine.values.model import Tokenizer
from engine.values.output import TokenLogprob
from engine.values.request import Request
from server.dialects.endpoint import MODEL_ERRORS, Endpoints, chunks
from server.dialects.job import Job, wire_json
from server.dialects.openai import (
    ChunkWriter,
    UsageBody,
    WireFinishReason,
    response_fields,
    usage_fields,
    wire_finish_reason,
)
from server.dialects.openai_logprobs import LOWEST_LOGPROB, token_text
from server.dialects.render import RenderedRequests, rendered_request, rendered_response
from server.generation.choice import AnswerUsage, Choice, Grew, Step
from server.generation.progress import ProgressBody
from server.generation.request_fields import (
    MAX_PROMPTS,
    GenerationRequest,
    NoSuffix,
    Prompt,
    TokenLimit,
    WirePrompt,
    parse_prompts,
)
from server.generation.requests import ServedModel, TextCompletion, prepare_completion
from server.generation.tools import MAX_TOOLS
from server.json_model import refused
from server.record import RequestRecord
from server.service import Context

WirePrompts = WirePrompt | Annotated[list[WirePrompt], Field(min_length=1, max_length=MAX_PROMPTS)]
Prompts = Annotated[list[Prompt], PlainValidator(parse_prompts, json_schema_input_type=WirePrompts)]
NoTools = SkipJsonSchema[
    Annotated[list[Any], Field(max_length=MAX_TOOLS), refused("only chat completions have tools")]
]

NoThinking = SkipJsonSchema[
    Annotated[Any, refused("the prompt goes past the template, which only chats have")]
]


class CompletionRequest(GenerationRequest):
    EXAMPLE: ClassVar = {"prompt": "A radix tree is", "max_tokens": 32, "temperature": 0}

    prompt: Prompts | None = None
    max_tokens: TokenLimit | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=20)
    suffix: NoSuffix = ""
    tools: NoTools = Field(default_factory=list)
    functions: NoTools = Field(default_factory=list)
    thinking_budget: NoThinking = None
    thinking_token_budget: NoThinking = None
    thinking_budget_tokens: NoThinking = None
    reasoning_budget_tokens: NoThinking = None
    enable_thinking: NoThinking = None
    thinking: NoThinking = None
    think: NoThinking = None
    reasoning: NoThinking = None
    reasoning_effort: NoThinking = None
    chat_template_kwargs: NoThinking = None

    @field_validator("best_of")
    @classmethod
    def _best_of_at_least_n(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        n, stream = info.data.get("n", 1), info.data.get("stream", False)
        if best_of is not None and best_of < n:
            raise PydanticCustomError("best_of", "must be at least n ({n})", {"n": n})
        if best_of is not None and best_of > n and stream:
            raise PydanticCustomError("best_of", "cannot be above n with stream")
        return best_of

    @property
    def completion(self) -> TextCompletion:
        """The completion that the body requests, without the fields that determine the answer's
        form.
        """
        return TextCompletion(
            prompts=self.prompt or [""],
            sampling=self,
            structure=self.structure,
            max_tokens=self.max_tokens,
            n=self.n,
            best_of=self.best_of,
            logprobs=self.logprobs,
            echo=self.echo,
        )


class CompletionLogprobs(TypedDict):
    """Parallel lists, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: WireFinishReason


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageBody


class CompletionChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: WireFinishReason | None  # null before the last: clients expect the key


class CompletionChunk(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    prompt_progress: NotRequired[ProgressBody]  # with return_progress, before the answer begins
    usage: NotRequired[UsageBody]  # set in the last chunk, with include_usage


PromptLogprobs = Sequence[TokenLogprob | None]


class CompletionForm:
    """Writes one request's completions. `echoes` are the prompts as text."""

    def __init__(
        self,
        body: CompletionRequest,
        model: ServedModel,
        requests: Sequence[Request],
        echoes: Sequence[str],
        id: str,
    ) -> None:
        self._fields = response_fields("cmpl", id, model)
        self._n = body.n
        self._requests = requests
        self._echoes = echoes
        self._include_usage = body.include_usage
        self._tokenizer = None if body.logprobs is None else model.engine.tokenizer

    def whole(self, choices: Sequence[Choice], usage: AnswerUsage) -> bytes:
        """The JSON of a Completion with all choices of all prompts, in index order; with `best_of`
        the most likely n of each.
        """
        sequences = self._requests[0].n
        rendered = list[CompletionChoice]()
        for prompt in range(len(self._requests)):
            siblings = choices[prompt * sequences : (prompt + 1) * sequences]
            prompt_logprobs = next((s.prompt_logprobs for s in siblings if s.prompt_logprobs), ())
            for sibling in best(siblings, self._n):
                text, logprobs = self.text_of(prompt).add(
                    sibling.content, sibling.logprobs, prompt_logprobs
                )
                rendered.append(
                    {
                        "index": len(rendered),
                        "text": text,
                        "logprobs": logprobs,
                        "finish_reason": wire_finish_reason(sibling.finish_reason),
                    }
                )
        completion: Completion = {
            **self._fields,
            "object": "text_completion",
            "choices": rendered,
            "usage": usage_fields(usage),
        }
        return to_json(completion)

    def writer(self, choices: Sequence[Choice]) -> "CompletionWriter":
        """The writer of a stream of choices; each prompt has `n`."""
        texts = [self.text_of(index // self._n) for index in range(len(choices))]
        empty: CompletionChunk = {**self._fields, "object": "text_completion", "choices": []}
        return CompletionWriter(empty, choices, texts, include_usage=self._include_usage)

    def text_of(self, prompt: int) -> "ChoiceText":
        """A new choice of the prompt with that index."""
        return ChoiceText(self._echoes[prompt], self._requests[prompt].prompt, self._tokenizer)


class ChoiceText:
    """Text and log-probabilities of one choice, piece by piece. The first piece has the text of the
    echoed prompt. The prompt's log-probabilities come in as many pieces as the engine sends.

    Log-probabilities have offsets, in characters from the beginning of the choice's text, echoed
    prompt included. A token that continues a character has the offset after that character's
    beginning.
    """

    def __init__(self, echo: str, prompt: Sequence[int], tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer the choice has no log-probabilities."""
        self._echo = echo
        self._unscored = iter(prompt)
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def add(
        self, text: str, entries: Sequence[TokenLogprob], prompt_entries: PromptLogprobs
    ) -> tuple[str, CompletionLogprobs | None]:
        """The text, and the log-probabilities of its tokens."""
        text, self._echo = self._echo + text, ""
        if self._tokenizer is None:
            return text, None
        scored = islice(self._unscored, len(prompt_entries))
        of_prompt = list(zip(scored, prompt_entries, strict=True))
        of_output = [(entry.token_id, entry) for entry in entries]
        return text, self._lists([*of_prompt, *of_output], self._tokenizer)

    def _lists(
        self, tokens: Sequence[tuple[int, TokenLogprob | None]], tokenizer: Tokenizer
    ) -> CompletionLogprobs:
        """The prompt's first token was not predicted: its entries are null."""
        lists: CompletionLogprobs = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, entry in tokens:
            token = tokenizer.token_bytes(token_id)
            lists["tokens"].append(token_text(token))
            lists["text_offset"].append(self._characters)
            self._characters += len(self._decoder.decode(token))
            lists["token_logprobs"].append(max(entry.logprob, LOWEST_LOGPROB) if entry else None)
            lists["top_logprobs"].append(_top(entry, tokenizer) if entry else None)
        return lists


def _top(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[str, float]:
    """Best first, then the token itself; where two read the same the better one stays."""
    top: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        text = token_text(tokenizer.token_bytes(token_id))
        top.setdefault(text, max(logprob, LOWEST_LOGPROB))
    return top


def best(siblings: Sequence[Choice], n: int) -> Sequence[Choice]:
    """The n choices with the highest mean logprob per token, or all if there are n."""
    if len(siblings) == n:
        return siblings
    return sorted(siblings, key=_mean_logprob, reverse=True)[:n]


def _mean_logprob(choice: Choice) -> float:
    logprobs = [entry.logprob for entry in choice.logprobs]
    return fmean(logprobs) if logprobs else -inf


_NOTHING = to_json({"index": 0, "text": "", "logprobs": None, "finish_reason": None})


class CompletionWriter(ChunkWriter):
    """The chunks of one streamed completion."""

    nothing = _NOTHING

    def __init__(
        self,
        empty: CompletionChunk,
        choices: Sequence[Choice],
        texts: Sequence[ChoiceText],
        *,
        include_usage: bool,
    ) -> None:
        super().__init__(empty, include_usage=include_usage)
        self._choices = choices
        self._texts = texts

    def write(self, choice: int, steps: Sequence[Step]) -> bytes:
        """See StreamWriter. Without new text there is no chunk."""
        answer = self._choices[choice]
        text, logprobs = self._texts[choice].add(
            "".join(step.text for step in steps if isinstance(step, Grew)),
            answer.take_logprobs(),
            answer.take_prompt_logprobs(),
        )
        is_over = answer.finish_reason is not None
        if not (text or is_over or (logprobs and logprobs["tokens"])):
            return b""
        reason = wire_finish_reason(answer.finish_reason) if is_over else None
        return self.chunk(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}'
            % (choice, to_json(text), to_json(logprobs), to_json(reason))
        )


router = Endpoints()
render_router = Endpoints()


@router.generation(
    "/v1/completions",
    body=CompletionRequest,
    answer=Completion,
    stream=chunks(CompletionChunk),
)
def create_completion(body: CompletionRequest, model: ServedModel, record: RequestRecord) -> Job:
    requests, echoes = prepare_completion(body.completion, model, record)
    form = CompletionForm(body, model, requests, echoes, record.id)
    return Job(
        model=model,
        requests=requests,
        render=form.whole,
        writer=form.writer if body.stream else None,
        form_bytes=sum(map(getsizeof, echoes)) if body.echo else 0,
    )


@render_router.endpoint(
    "POST",
    "/v1/completions/render",
    body=CompletionRequest,
    answer=RenderedRequests,
    errors=MODEL_ERRORS,
)
async def render_completion(context: Context) -> Response:
    """One entry for each prompt."""
    return await rendered_response(context, CompletionRequest, _rendered)


def _rendered(
    body: CompletionRequest, model: ServedModel, record: RequestRecord
) -> tuple[Sequence[Request], bytes]:
    requests, _ = prepare_completion(body.completion, model, record)
    answer = RenderedRequests([rendered_request(each, body, model.name) for each in requests])
    return requests, wire_json(answer)

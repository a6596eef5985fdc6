"""Turns a client's request into engine requests, within the limits of the loaded model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from engine.api import Engine
from engine.values.model import ModelCard, SamplingDefaults, Task
from engine.values.request import TEXT_BEFORE_TOKENS, LoopLimit, Request, SamplingParams
from engine.values.tokens import pack
from server.errors import UNSUPPORTED, ApiError, InvalidField
from server.generation.conversation import Chat
from server.generation.history import CommonPrefixTracker, Replays
from server.generation.images import with_images
from server.generation.plan import AnswerPlan, AnswerPlanner
from server.generation.prompt import (
    PromptEncoder,
    check_prompt,
    check_token_ids,
    too_long,
)
from server.generation.request_fields import (
    MAX_PROMPTS,
    NO_LIMIT,
    Prompt,
    SampledRequest,
    Structure,
)
from server.generation.sampler_fields import BreakerTokens, xtc_of
from server.record import RequestRecord
from server.settings.models import ModelSettings


@dataclass(frozen=True, slots=True)
class ModelAlias:
    """One name that requests may use for a model, with or without an adapter.

    `root` is the first of the names that mean the same. For an adapter, `parent` is the name of the
    model that it changes.
    """

    name: str
    root: str
    adapter: str = ""
    parent: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model under one of its names, with its settings, engine, tokenizer threads, formats and
    replays.
    """

    alias: ModelAlias
    settings: ModelSettings
    engine: Engine
    prompts: PromptEncoder
    planner: AnswerPlanner
    replays: Replays
    prefixes: CommonPrefixTracker
    breakers: BreakerTokens

    @property
    def name(self) -> str:
        return self.alias.name

    @property
    def adapter(self) -> str:
        return self.alias.adapter

    @property
    def fingerprint(self) -> str:
        """A digest that changes with the weights of the model or of the adapter."""
        card = self.engine.card
        adapter = card.adapters.get(self.adapter)
        return f"{card.fingerprint}-{adapter}" if adapter else card.fingerprint


def model_aliases(names: Sequence[str], adapters: Iterable[str]) -> tuple[ModelAlias, ...]:
    """The names of a model, its own first, then each adapter as `name:adapter` of each name."""
    own = names[0]
    adapted = [
        ModelAlias(f"{name}:{adapter}", f"{own}:{adapter}", adapter, own)
        for adapter in adapters
        for name in names
    ]
    return (*(ModelAlias(name, own) for name in names), *adapted)


def served_models(
    names: Iterable[ModelAlias],
    engine: Engine,
    settings: ModelSettings,
    replays: Mapping[str, Replays],
) -> Mapping[str, ServedModel]:
    """The engine's model by each of its names. `replays` are by adapter: adapters do not share
    them.
    """
    planner = AnswerPlanner(engine.tokenizer, settings)
    prompts = PromptEncoder(engine.tokenizer, planner, engine.card)
    prefixes = CommonPrefixTracker()
    breakers = BreakerTokens(engine.tokenizer, engine.card.vocab_size)
    return {
        alias.name: ServedModel(
            alias, settings, engine, prompts, planner, replays[alias.adapter], prefixes, breakers
        )
        for alias in names
    }


_USE_INSTEAD = {
    Task.GENERATE: "It answers /v1/chat/completions and the other routes of answers.",
    Task.EMBED: "It embeds: use /v1/embeddings, or /v1/rerank by similarity.",
    Task.RERANK: "It reranks: use /v1/rerank or /v1/score.",
}
_CANNOT = {
    Task.GENERATE: "writes no answers",
    Task.EMBED: "has no embeddings",
    Task.RERANK: "does not rerank",
}
_ENABLE_BY = {
    Task.EMBED: " Its checkpoint has no files for embeddings; the setting pooling (--pooling last, "
    "or mean) makes it embed.",
    Task.RERANK: " The setting reranker (--reranker yes-no) serves a checkpoint such as "
    "Qwen3-Reranker as one.",
}
"""Hints for a generating model that is used for other tasks, appended to the error."""


def check_task(model: ServedModel, *tasks: Task) -> None:
    """Raise ApiError (400) unless the model is for one of the tasks."""
    served = model.engine.card.tasks
    if not set(tasks) & set(served):
        raise _refusal(model.name, tasks[0], served)


def _refusal(name: str, asked: Task, served: tuple[Task, ...]) -> ApiError:
    where = " ".join(_USE_INSTEAD[task] for task in served)
    how = _ENABLE_BY.get(asked, "") if Task.GENERATE in served else ""
    return InvalidField(
        "model", f"'{name}' {_CANNOT[asked]}. {where}{how}", code="task_not_supported"
    )


BadWords = tuple[tuple[int, ...], ...]
"""The tokens of texts that are not generated."""

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
MAX_SEQUENCES = MAX_PROMPTS


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCompletion:
    """Prompts that are continued without a chat template. Each dialect that has them reads its
    bodies into one.
    """

    prompts: Sequence[Prompt]
    sampling: SampledRequest
    structure: Structure | None = None
    max_tokens: int | None = None  # None: COMPLETION_MAX_TOKENS; -1: as many as there is room for
    n: int = 1  # sequences that are returned for each prompt ...
    best_of: int | None = None  # ... of these
    logprobs: int | None = None  # how many alternatives of each token; None: no logprobs
    echo: bool = False  # the answer begins with the prompt


def prepare_chat(
    chat: Chat, model: ServedModel, record: RequestRecord
) -> tuple[Request, AnswerPlan]:
    """The engine's request, and the plan for parsing its answers.

    Raises ApiError (400) for what the model cannot serve, and UnpreparedImages.
    """
    check_task(model, Task.GENERATE)
    if chat.conversation.images:
        shown = with_images(chat.conversation, model.engine, record)
        chat = replace(chat, conversation=shown)
    salt = record.cache_salt(chat.conversation.cache_salt)
    prompt, images = encoded = model.prompts.chat(chat.conversation, model.replays, salt)
    prediction = tuple[int, ...]()
    if chat.prediction:  # as the model would write it, in the midst of its turn
        prediction = model.prompts.text(
            chat.prediction, add_special_tokens=False, param="prediction"
        )
    card = model.engine.card
    check_token_ids(prediction, card, "prediction")
    max_tokens = _max_tokens(chat.max_tokens, prompt, card, "messages", encoded.image_tokens)
    plan = model.planner.plan(_with_budget(chat, model, max_tokens), prompt)
    check_prompt(prompt, card, "messages")
    has_stops = chat.sampling.stop or chat.sampling.stop_token_ids
    request = _request(
        chat.sampling,
        chat.logprobs,
        (*model.prompts.bad_words(chat.sampling.bad_words), *plan.forbidden),
        model,
        record,
        id=record.id,
        prompt=pack(prompt),
        images=images,
        max_tokens=max_tokens,
        n=chat.n,
        prediction=pack(prediction),
        skip_special_tokens=plan.skip_special_tokens,
        text_before=_end(prompt) if chat.conversation.continue_final_message else (),
        constraint=plan.constraint,
        thinking_budget=plan.thinking_budget,
        markup=plan.markup if has_stops else None,
        has_tools=bool(plan.functions),
    )
    return request, plan


def _with_budget(chat: Chat, model: ServedModel, max_tokens: int) -> Chat:
    """The chat with a budget of thinking, where it has an effort that the template cannot be told
    of.
    """
    effort = chat.conversation.reasoning_effort
    if effort is None or chat.thinking_budget is not None or not model.planner.reasons:
        return chat
    return replace(chat, thinking_budget=model.prompts.efforts.budget(effort, max_tokens))


def prepare_completion(
    completion: TextCompletion, model: ServedModel, record: RequestRecord
) -> tuple[list[Request], list[str]]:
    """The engine's requests, one for each prompt, and each prompt as text if `echo` is set.

    Raises ApiError (400) for what the model cannot serve.
    """
    check_task(model, Task.GENERATE)
    given: list[Prompt] = [
        _opening(model) if prompt == "" else prompt for prompt in completion.prompts
    ]
    prompts = [model.prompts.text(prompt) for prompt in given]
    requests = _checked_requests(completion, prompts, model, record)
    echoes = [model.prompts.echo(prompt) if completion.echo else "" for prompt in given]
    return requests, echoes


def _opening(model: ServedModel) -> Prompt:
    """The prompt that an empty or absent text stands for: the tokenizer's special tokens, or else
    the end-of-text token. OpenAI's default prompt, <|endoftext|>, is such a token.

    Raises ApiError (400) where the tokenizer adds none, and the model has not exactly one such.
    """
    marked, ends = model.prompts.text(""), model.engine.card.eos_token_ids
    if not marked and len(ends) != 1:
        raise InvalidField("prompt", "this model has no token to begin with, so a prompt is needed")
    return list(marked or ends)


def _checked_requests(
    completion: TextCompletion,
    prompts: Sequence[tuple[int, ...]],
    model: ServedModel,
    record: RequestRecord,
) -> list[Request]:
    card, sampling, logprobs = model.engine.card, completion.sampling, completion.logprobs
    for prompt in prompts:
        check_prompt(prompt, card, "prompt")
    constraint = model.planner.text_constraint(completion.structure)
    sequences = completion.best_of or completion.n
    if len(prompts) * sequences > MAX_SEQUENCES:
        limit = f"at most {MAX_SEQUENCES} sequences in one request"
        raise InvalidField("n", f"{len(prompts)} prompts times {sequences} are too many: {limit}")
    asked = COMPLETION_MAX_TOKENS if completion.max_tokens is None else completion.max_tokens
    words = model.prompts.bad_words(sampling.bad_words)
    return [
        _request(
            sampling,
            0 if logprobs is None and sequences > completion.n else logprobs,
            words,
            model,
            record,
            id=f"{record.id}-{index}",
            prompt=pack(prompt),
            max_tokens=_max_tokens(asked, prompt, card, "prompt"),
            n=sequences,
            prompt_logprobs=logprobs if completion.echo else None,
            text_before=_end(prompt),
            constraint=constraint,
        )
        for index, prompt in enumerate(prompts)
    ]


def _end(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The last tokens of a prompt, whose text the output continues."""
    return prompt[-TEXT_BEFORE_TOKENS:]


def _max_tokens(
    asked: int | None,
    prompt: tuple[int, ...],
    card: ModelCard,
    param: str,
    image_tokens: int = 0,
) -> int:
    """The requested number, at most the rest of the context, which is the default."""
    left_tokens = card.max_sequence_tokens - len(prompt)
    if left_tokens < 0 or (left_tokens == 0 and asked != 0):
        raise too_long(str(len(prompt)), card, param, image_tokens)
    return left_tokens if asked in {None, NO_LIMIT} else min(asked, left_tokens)


def _request(
    body: SampledRequest,
    logprobs: int | None,
    bad_words: BadWords,
    model: ServedModel,
    record: RequestRecord,
    *,
    max_tokens: int,
    has_tools: bool = False,
    **fields: Any,
) -> Request:
    """The request with these other fields of a Request. Raises ApiError (400)."""
    card = model.engine.card
    if any(not 0 <= token_id < card.vocab_size for token_id in body.stop_token_ids):
        limit = f"within 0 and {card.vocab_size - 1}"
        raise InvalidField("stop_token_ids", f"token ids must be {limit}")
    sampling = _sampling(body, model, max_tokens, logprobs)
    special, ids = model.engine.tokenizer.special_tokens, model.engine.tokenizer.added_tokens
    named = {ids[text]: text for text in body.stop if text in special and text in ids}
    request = Request(
        max_tokens=max_tokens,
        sampling=_with_bad_words(sampling, bad_words, body.stop_token_ids, card),
        stop=tuple(body.stop),
        stop_token_ids=frozenset(body.stop_token_ids),
        named_stops=named,
        loops=_loops(body, model, has_tools=has_tools),
        ignore_eos=body.ignore_eos,
        speculate=body.speculate,
        reports_progress=body.stream and body.return_progress,
        client=record.client,
        priority=body.priority,
        cache_salt=record.cache_salt(body.cache_salt),
        adapter=model.adapter,
        shared_tokens=None if body.prompt_cache_options.keep else 0,
        **fields,
    )
    return without_output(request) if body.is_prewarm else request


def without_output(request: Request) -> Request:
    """The request that computes the same prompt, and generates nothing."""
    sampling = replace(request.sampling, min_tokens=0)
    return replace(request, max_tokens=0, constraint=None, thinking_budget=None, sampling=sampling)


def _loops(body: SampledRequest, model: ServedModel, *, has_tools: bool) -> LoopLimit | None:
    """When an output that repeats itself ends: as the request says, or with tools at all."""
    asked = body.repetition_detection
    if asked is not None:
        least = max(asked.min_pattern_size, 1)
        most = asked.max_pattern_size
        return LoopLimit(most, least, asked.min_count) if most else None
    return LoopLimit() if has_tools and model.settings.loops == "end" else None


def _sampling(
    body: SampledRequest, model: ServedModel, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    card = model.engine.card
    if body.min_tokens > max_tokens:
        raise InvalidField(
            "min_tokens",
            f"{body.min_tokens} is above the {max_tokens} tokens that may be generated",
        )
    asked, penalty = _with_defaults(body, card.sampling), _repetition_penalty(body)
    return SamplingParams(
        temperature=asked.temperature if asked.top_p else 0.0,  # no mass at all: the best alone
        top_p=asked.top_p or 1.0,
        top_k=max(asked.top_k, 0),
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty if penalty is None else penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body, card),
        allowed_token_ids=_allowed_token_ids(body, card),
        seed=None if body.seed is None else body.seed % 2**64,
        top_logprobs=None if logprobs is None else min(logprobs, card.vocab_size),
        min_tokens=body.min_tokens,
        xtc=xtc_of(body, card.eos_token_ids, model.engine.tokenizer)
        if body.xtc_probability
        else None,
        dry=model.breakers.dry_of(body) if body.dry_multiplier else None,
    )


def _repetition_penalty(body: SampledRequest) -> float | None:
    """The penalty by either of its names; None where the request has neither. Raises ApiError (400)
    where they differ, and where it is for a part of the tokens.
    """
    names = (body.repetition_penalty, body.repeat_penalty)
    given = {penalty for penalty in names if penalty is not None}
    if len(given) > 1:
        raise InvalidField("repeat_penalty", "it contradicts repetition_penalty")
    has_penalty = body.presence_penalty or body.frequency_penalty or given - {1}
    if body.repeat_last_n not in {None, -1} and has_penalty:
        message = "a penalty covers all tokens of prompt and output; only -1 passes with one"
        raise InvalidField("repeat_last_n", message, UNSUPPORTED)
    return given.pop() if given else None


def _with_defaults(body: SampledRequest, defaults: SamplingDefaults) -> SamplingDefaults:
    """The request's values, with the model's defaults for omitted ones."""
    names = {field.name for field in fields(defaults)}
    return replace(defaults, **body.model_dump(include=names, exclude_none=True))


def _logit_bias(body: SampledRequest, card: ModelCard) -> Mapping[int, float]:
    biases = {int(token_id): bias for token_id, bias in body.logit_bias.items()}
    if biases and max(biases) >= card.vocab_size:
        limit = f"within 0 and {card.vocab_size - 1}"
        raise InvalidField("logit_bias", f"token ids must be {limit}, not {max(biases)}")
    return biases


def _allowed_token_ids(body: SampledRequest, card: ModelCard) -> frozenset[int] | None:
    if body.allowed_token_ids is None:
        return None
    check_token_ids(body.allowed_token_ids, card, "allowed_token_ids")
    return frozenset(body.allowed_token_ids)


def _with_bad_words(
    sampling: SamplingParams, words: BadWords, stop_token_ids: Sequence[int], card: ModelCard
) -> SamplingParams:
    """Sampling of an output that may not have these words. Raises ApiError (400) where no token is
    left that may come first.
    """
    if sampling.allowed_token_ids is not None:
        left = sampling.allowed_token_ids.difference(word[0] for word in words if len(word) == 1)
        if not left:
            raise InvalidField("bad_words", "they rule out all of allowed_token_ids")
        if sampling.min_tokens and left <= card.eos_token_ids.union(stop_token_ids):
            message = "what is left of them ends the answer, which min_tokens rules out"
            raise InvalidField("allowed_token_ids", message)
    return replace(sampling, bad_words=words)

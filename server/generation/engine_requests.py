"""Engine requests made of HTTP requests, checked against the limits of the loaded model."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from engine.values.model import ModelCard, SamplingDefaults
from engine.values.request import Constraint, Request, SamplingParams
from server.errors import ApiError, ContextTooLong, InvalidField
from server.generation.chat import Chat
from server.generation.completion_request import MAX_PROMPTS, CompletionRequest
from server.generation.plan import AnswerPlan
from server.generation.request_fields import NO_LIMIT, SampledRequest
from server.record import RequestRecord

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
MAX_CHOICES = MAX_PROMPTS


def chat_request(
    chat: Chat,
    prompt: tuple[int, ...],
    plan: AnswerPlan,
    card: ModelCard,
    record: RequestRecord,
) -> Request:
    """Raises ApiError (400) for what the model cannot serve."""
    max_tokens = _max_tokens(chat.max_tokens, prompt, card, "messages")
    check_prompt(prompt, card, "messages")
    sampling, logprobs = chat.sampling, chat.logprobs
    request = _request(sampling, prompt, card, record.id, record, max_tokens, chat.n, logprobs)
    return replace(
        request,
        skip_special_tokens=plan.skip_special_tokens,
        text_before=prompt if chat.conversation.continue_final_message else (),
        constraint=plan.constraint,
        thinking_budget=plan.thinking_budget,
    )


def completion_requests(
    body: CompletionRequest,
    prompts: Sequence[tuple[int, ...]],
    constraint: Constraint | None,
    card: ModelCard,
    record: RequestRecord,
) -> list[Request]:
    """One engine request for each prompt.

    Raises ApiError (400) for what the model cannot serve.
    """
    sequences = sequences_per_prompt(body)
    if len(prompts) * sequences > MAX_CHOICES:
        limit = f"at most {MAX_CHOICES} sequences in one request"
        raise InvalidField("n", f"{len(prompts)} prompts times {sequences} are too many: {limit}")
    asked = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    logprobs = 0 if body.logprobs is None and sequences > body.n else body.logprobs
    requests = [
        _request(
            body,
            prompt,
            card,
            f"{record.id}-{index}",
            record,
            _max_tokens(asked, prompt, card, "prompt"),
            sequences,
            logprobs,
            body.logprobs if body.echo else None,
        )
        for index, prompt in enumerate(prompts)
    ]
    return [replace(one, text_before=one.prompt, constraint=constraint) for one in requests]


def sequences_per_prompt(body: CompletionRequest) -> int:
    """How many sequences are generated for each prompt; `n` of them are returned."""
    return body.best_of or body.n


def opening_token(card: ModelCard) -> int:
    """The token before the first of a text, where the tokenizer adds none: the end-of-text token.

    OpenAI's default prompt, <|endoftext|>, is such a token. Raises ApiError (400) unless the model
    has exactly one.
    """
    if len(card.eos_token_ids) != 1:
        raise InvalidField("prompt", "this model has no token to begin with, so a prompt is needed")
    (token_id,) = card.eos_token_ids
    return token_id


def check_prompt(prompt: tuple[int, ...], card: ModelCard, param: str) -> None:
    """Raise ApiError (400) unless the prompt has tokens, all of them the model's."""
    if not prompt:
        raise InvalidField(param, "the prompt is empty")
    check_token_ids(prompt, card, param)


def check_token_ids(tokens: Sequence[int], card: ModelCard, param: str) -> None:
    """Raise ApiError (400) unless all of them are the model's."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < card.vocab_size:
        raise InvalidField(param, f"token ids must be within 0 and {card.vocab_size - 1}")


def _request(
    body: SampledRequest,
    prompt: tuple[int, ...],
    card: ModelCard,
    request_id: str,
    record: RequestRecord,
    max_tokens: int,
    sequences: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> Request:
    if any(not 0 <= token_id < card.vocab_size for token_id in body.stop_token_ids):
        limit = f"within 0 and {card.vocab_size - 1}"
        raise InvalidField("stop_token_ids", f"token ids must be {limit}")
    return Request(
        id=request_id,
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=_sampling(body, card, max_tokens, logprobs),
        stop=tuple(body.stop),
        stop_token_ids=frozenset(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        speculate=body.speculate,
        n=sequences,
        client=record.client,
        priority=body.priority,
        cache_salt=record.cache_salt(body.cache_salt),
        prompt_logprobs=prompt_logprobs,
    )


def _sampling(
    body: SampledRequest, card: ModelCard, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    if body.min_tokens > max_tokens:
        raise InvalidField(
            "min_tokens",
            f"{body.min_tokens} is above the {max_tokens} tokens that may be generated",
        )
    asked = _with_defaults(body, card.sampling)
    return SamplingParams(
        temperature=asked.temperature if asked.top_p else 0.0,  # no mass at all: the best alone
        top_p=asked.top_p or 1.0,
        top_k=max(asked.top_k, 0),
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body, card),
        allowed_token_ids=_allowed_token_ids(body, card),
        seed=None if body.seed is None else body.seed % 2**64,
        top_logprobs=None if logprobs is None else min(logprobs, card.vocab_size),
        min_tokens=body.min_tokens,
    )


def _with_defaults(body: SampledRequest, defaults: SamplingDefaults) -> SamplingDefaults:
    """The request's values, and the model's defaults for those that it leaves out."""
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


def with_bad_words(
    request: Request, words: tuple[tuple[int, ...], ...], card: ModelCard
) -> Request:
    """The request, whose output may not have these words. Raises ApiError (400) where its fields
    leave no token that may come first.
    """
    sampling = replace(request.sampling, bad_words=words)
    if sampling.allowed_token_ids is not None:
        left = sampling.allowed_token_ids.difference(word[0] for word in words if len(word) == 1)
        if not left:
            raise InvalidField("bad_words", "they rule out all of allowed_token_ids")
        if sampling.min_tokens and left <= card.eos_token_ids | request.stop_token_ids:
            message = "what is left of them ends the answer, which min_tokens rules out"
            raise InvalidField("allowed_token_ids", message)
    return replace(request, sampling=sampling)


def _max_tokens(asked: int | None, prompt: tuple[int, ...], card: ModelCard, param: str) -> int:
    """As many as asked for, at most what the context has left; all of it if nothing is asked."""
    left_tokens = card.max_sequence_tokens - len(prompt)
    if left_tokens < 0 or (left_tokens == 0 and asked != 0):
        raise too_long(str(len(prompt)), card, param)
    return left_tokens if asked in {None, NO_LIMIT} else min(asked, left_tokens)


def too_long(tokens: str, card: ModelCard, param: str) -> ApiError:
    """The prompt is too long."""
    limit, whose = min(
        (card.max_context_tokens, ""), (card.arena_tokens, ", all that the KV cache holds")
    )
    return ContextTooLong(tokens, limit, whose, param)

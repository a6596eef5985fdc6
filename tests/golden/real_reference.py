"""What mlx-lm itself says on a real model, and an engine that is compared with it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model, load

from engine.core.drafting import DraftPolicy
from engine.values.output import FinishReason, TokenLogprob
from engine.values.request import Request, SamplingParams
from engine.values.settings import KVFormat
from engine.values.tokens import pack
from tests.golden.driving import Logits, expect_greedy
from tests.golden.real_prompts import Prompt, Writer
from tests.offline import OfflineDaemon, Room, Served, write_text

CHUNK_TOKENS = 512
"""Computed at once for log-probabilities, whose logits take 100 MB then."""

CACHE_BYTES = 256 << 20

MAX_WAITING = 256
"""One client may take half of the places, and a hundred prompts wait at once."""

GREEDY = SamplingParams(temperature=0)
GREEDY_WITH_TWO_BEST = SamplingParams(temperature=0, top_logprobs=2)


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer. The tokens include the end token if it has one; the text does not.

    `logprobs`, of each token if they were requested, are not compared.
    """

    tokens: tuple[int, ...]
    text: str
    reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = field(default=(), compare=False)

    def parting(self, other: "Answer") -> int | None:
        """How many first tokens are the same in both answers, or None if all are."""
        if self.tokens == other.tokens:
            return None
        pairs = zip(self.tokens, other.tokens, strict=False)
        return next(at for at, (ours, theirs) in enumerate(pairs) if ours != theirs)


@dataclass(frozen=True, slots=True)
class Scores:
    """Of each token of a text but the first: its log-probability, and the likeliest token there."""

    logprobs: tuple[float, ...]
    likeliest: tuple[int, ...]

    @classmethod
    def of(cls, logits: Iterable[Logits], following: Sequence[int]) -> "Scores":
        """Those of tokens by the logits before each of them.

        Exponentials are summed in float64: on a CPU `mx.logsumexp` of 49,152 numbers is up to
        2.5e-4 too small.
        """
        logprobs, likeliest = list[float](), list[int]()
        for part in logits:
            tokens = np.array(following[len(logprobs) : len(logprobs) + len(part)])
            shifted = part - part.max(axis=1, keepdims=True)
            chosen = np.take_along_axis(shifted, tokens[:, None], axis=1)[:, 0]
            sums = np.exp(shifted).sum(axis=1, dtype=np.float64)
            logprobs += (chosen - np.log(sums)).tolist()
            likeliest += part.argmax(axis=1).tolist()
        return cls(tuple(logprobs), tuple(likeliest))

    @property
    def perplexity(self) -> float:
        return perplexity(self.logprobs)


def perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


@dataclass(eq=False)
class Reference:
    """mlx-lm's model in float32, with mlx-lm's own caches. Answers are computed once."""

    model: Module
    tokenizer: TokenizerWrapper
    _answers: dict[Prompt, Answer] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Path) -> "Reference":
        model, tokenizer, *_ = load(str(checkpoint))
        model.set_dtype(mx.float32)  # first: dequantized weights have the precision of the scales
        model = dequantize_model(model)
        mx.eval(model.parameters())
        return cls(model, tokenizer)

    @property
    def writer(self) -> Writer:
        return Writer(self.tokenizer, lambda prompt: self.answer(prompt).text)

    def answer(self, prompt: Prompt) -> Answer:
        """The greedy answer of mlx_lm's generate."""
        if (known := self._answers.get(prompt)) is not None:
            return known
        parts = [
            *stream_generate(self.model, self.tokenizer, list(prompt.tokens), prompt.max_tokens)
        ]
        answer = self.answer_of([part.token for part in parts])
        assert answer.reason == parts[-1].finish_reason
        return self._answers.setdefault(prompt, answer)

    def answer_of(self, tokens: Sequence[int]) -> Answer:
        """The answer that has these tokens."""
        # The pieces of text lack a space at the beginning, which belongs to continued text.
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        is_ended = tokens[-1] in self.tokenizer.eos_token_ids
        return Answer(tuple(tokens), text, FinishReason.STOP if is_ended else FinishReason.LENGTH)

    def scores(self, tokens: Sequence[int]) -> Scores:
        """How likely each token of a text is after those before it, by the logits of mlx-lm."""
        return Scores.of(self.logits(tokens[:-1]), tokens[1:])

    def logits(self, tokens: Sequence[int]) -> Iterator[Logits]:
        """The logits after each token, `[tokens, vocabulary]`, for some tokens at a time."""
        cache = make_prompt_cache(self.model)
        for start in range(0, len(tokens), CHUNK_TOKENS):
            chunk = list(tokens[start : start + CHUNK_TOKENS])
            yield np.array(self.model(mx.array([chunk]), cache=cache)[0])

    def expect(self, prompt: Prompt, found: Answer) -> None:
        """The answer is mlx-lm's, to the letter. Where mlx-lm's two best logits are within NEAR_TIE
        of each other it may have the second one, and must then continue as mlx-lm does.
        """
        expected = self.answer(prompt)
        if found.tokens != expected.tokens:
            expect_greedy(self.model, prompt.tokens, found.tokens)
            expected = self.answer_of(found.tokens)
            is_full = len(found.tokens) == prompt.max_tokens
            assert is_full or found.reason is FinishReason.STOP, f"{prompt.name}: {found}"
        assert found == expected, prompt.name


@contextmanager
def little_cache() -> Iterator[None]:
    """MLX keeps few buffers that are not in use, as in the daemon. By default it keeps gigabytes
    of those that forwards of many lengths leave.
    """
    before = mx.set_cache_limit(CACHE_BYTES)
    try:
        yield
    finally:
        mx.set_cache_limit(before)
        mx.clear_cache()


def stored_as(full: Served, kv_format: KVFormat) -> Served:
    """The model with K and V stored in the format. The weights are those of `full`."""
    layout = full.layout.stored_as(kv_format)
    return Served(replace(full.loaded, layout=layout), full.execution)


class RealDaemon(OfflineDaemon):
    """An engine as the daemon has it: with the tokenizer's text, end tokens, and drafts. Its clock
    stands still but for a tick at each reading, so which drafts are verified depends on no speed.
    """

    def __init__(self, served: Served, room: Room, **options: Any) -> None:
        clock: Callable[[], float] = partial(next, count(0.0, 1e-3))
        super().__init__(
            served,
            served.execution.attention,
            room,
            clock=clock,
            drafts=DraftPolicy,
            write=write_text,
            max_waiting=MAX_WAITING,
            **options,
        )
        self._n_rounds = count()

    def answers(
        self,
        prompts: Iterable[Prompt],
        n: int = 1,
        speculate: bool = True,
        sampling: SamplingParams = GREEDY,
    ) -> dict[Prompt, list[Answer]]:
        """The n answers to each prompt, all computed together."""
        nth, prompts = next(self._n_rounds), list(prompts)
        self.usage.clear()
        said = self.serve(
            *(
                Request(
                    f"{nth} {prompt.name}",
                    pack(prompt.tokens),
                    prompt.max_tokens,
                    sampling,
                    n=n,
                    speculate=speculate,
                )
                for prompt in prompts
            )
        )
        found = {prompt: list[Answer]() for prompt in prompts}
        for prompt in prompts:
            for index in range(n):
                name = f"{nth} {prompt.name}", index
                tokens, logprobs = tuple(said[name]), tuple(self.logprobs[name])
                answer = Answer(tokens, self.texts[name], self.reasons[name], logprobs)
                found[prompt].append(answer)
        return found

    @property
    def cached_tokens(self) -> int:
        """Tokens of the last prompts that were cached."""
        return sum(usage.cached_tokens for usage in self.usage.values())

    @property
    def accepted_tokens(self) -> int:
        """Tokens of the last answers that were drafted."""
        return sum(usage.accepted_draft_tokens for usage in self.usage.values())

    def scores(self, tokens: Sequence[int], max_tokens: int = 1) -> tuple[Scores, Answer]:
        """What the engine's prompt log-probabilities say of a text, and its greedy answer to it."""
        name = f"{next(self._n_rounds)} scored"
        request = Request(name, pack(tokens), max_tokens, GREEDY, prompt_logprobs=1)
        said = self.serve(request)[name, 0]
        first, *rest = self.prompt_logprobs[name]
        assert first is None
        known = [one for one in rest if one is not None]
        assert [one.token_id for one in known] == list(tokens[1:])
        scores = Scores(tuple(one.logprob for one in known), tuple(one.top[0][0] for one in known))
        return scores, Answer(tuple(said), self.texts[name, 0], self.reasons[name, 0])


def expect_all(reference: Reference, found: dict[Prompt, list[Answer]]) -> None:
    """All answers are mlx-lm's: see `Reference.expect`."""
    for prompt, answers in found.items():
        for answer in answers:
            reference.expect(prompt, answer)

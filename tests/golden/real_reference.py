"""What mlx-lm itself says on a real model, and an engine that is compared with it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model, load

from engine.drafts.policy import DraftPolicy
from engine.values.output import FinishReason
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from tests.golden.real_prompts import Prompt, Writer
from tests.offline import OfflineDaemon, Room, Served, write_text

TIE = 1e-4
"""Two logits that differ by a smaller share of the larger one may be ranked otherwise: sums of
float32 in another order differ in their last bits.
"""

CHUNK_TOKENS = 512
"""Computed at once for log-probabilities, whose logits take 100 MB then."""

GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer. The tokens include the end token if it has one; the text does not."""

    tokens: tuple[int, ...]
    text: str
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Scores:
    """Of each token of a text but the first: its log-probability, and the likeliest token there."""

    logprobs: tuple[float, ...]
    likeliest: tuple[int, ...]

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
        tokens = tuple(part.token for part in parts)
        # The pieces of text lack a space at the beginning, which belongs to continued text.
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        answer = Answer(tokens, text, FinishReason(parts[-1].finish_reason))
        return self._answers.setdefault(prompt, answer)

    def scores(self, tokens: Sequence[int]) -> Scores:
        """How likely each token of a text is after those before it.

        The logits are mlx-lm's. Their exponentials are summed in float64: on a CPU
        `mx.logsumexp` of 49,152 numbers is up to 2.5e-4 too small.
        """
        cache, logprobs, likeliest = make_prompt_cache(self.model), list[float](), list[int]()
        bounds = (*range(0, len(tokens) - 1, CHUNK_TOKENS), len(tokens) - 1)
        for start, stop in pairwise(bounds):
            logits = np.array(self.model(mx.array([list(tokens[start:stop])]), cache=cache)[0])
            following = np.array(tokens[start + 1 : stop + 1])[:, None]
            logits -= logits.max(axis=1, keepdims=True)
            chosen = np.take_along_axis(logits, following, axis=1)[:, 0]
            logprobs += (chosen - np.log(np.exp(logits).sum(axis=1, dtype=np.float64))).tolist()
            likeliest += logits.argmax(axis=1).tolist()
        return Scores(tuple(logprobs), tuple(likeliest))

    def shortfall(self, prompt: Sequence[int], said: Sequence[int]) -> float:
        """By how much a said token's logit is below the best one at most, as a share of that."""
        cache = make_prompt_cache(self.model)
        before = [*prompt, *said[:-1]]
        for start in range(0, len(prompt) - 1, CHUNK_TOKENS):
            chunk = before[start : min(start + CHUNK_TOKENS, len(prompt) - 1)]
            self.model(mx.array([chunk]), cache=cache)
            mx.eval([part.state for part in cache])
        logits = np.array(self.model(mx.array([before[len(prompt) - 1 :]]), cache=cache)[0])
        chosen = np.take_along_axis(logits, np.array(said)[:, None], axis=1)[:, 0]
        best = logits.max(axis=1)
        return float(((best - chosen) / np.abs(best)).max())

    def expect(self, prompt: Prompt, found: Answer) -> bool:
        """The answer is mlx-lm's, to the letter. Where two tokens are as likely, it may go on with
        the other one, and each of its tokens must be the likeliest, or as likely as that. Returns
        whether it is mlx-lm's.
        """
        expected = self.answer(prompt)
        if found == expected:
            return True
        short = self.shortfall(prompt.tokens, found.tokens)
        assert short < TIE, f"{prompt.name}: {found} instead of {expected}, {short:.2g} short"
        assert found.tokens != expected.tokens, f"{prompt.name}: {found} instead of {expected}"
        return False


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
            **options,
        )
        self._n_rounds = count()

    def answers(
        self, prompts: Iterable[Prompt], n: int = 1, speculate: bool = True
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
                    GREEDY,
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
                tokens, text = tuple(said[name]), self.texts[name]
                found[prompt].append(Answer(tokens, text, self.reasons[name]))
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


def expect_all(reference: Reference, found: dict[Prompt, list[Answer]], most_ties: int = 0) -> None:
    """All answers are mlx-lm's, but for `most_ties` that part where two tokens are as likely."""
    ties = [
        prompt.name
        for prompt, answers in found.items()
        for answer in answers
        if not reference.expect(prompt, answer)
    ]
    assert len(ties) <= most_ties, ties

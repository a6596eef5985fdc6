"""Engine output to text completions and their chunks. No I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any

from engine.types import OutputEvent, Tokenizer, TokenLogprob
from server.dialects.chat import Envelope, usage_body, wire_finish_reason
from server.dialects.logprobs import CompletionLogprobBuilder, joined
from server.generation.engine_requests import sequences_per_prompt
from server.generation.events import Generated, UsageMeter
from server.schemas.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)

PromptLogprobs = tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class CompletionTask:
    """A validated request with its prompts as tokens and, with `echo`, as text."""

    body: CompletionRequest
    prompts: Sequence[tuple[int, ...]]
    echoes: Sequence[str]
    tokenizer: Tokenizer

    def choice(self, prompt: int) -> "ChoiceText":
        """A fresh choice of the prompt with that index."""
        wanted = self.body.logprobs is not None
        builder = CompletionLogprobBuilder(self.tokenizer) if wanted else None
        return ChoiceText(self.echoes[prompt], self.prompts[prompt], builder)


class ChoiceText:
    """Text and logprobs of one choice, piece by piece; the first piece echoes the prompt."""

    def __init__(
        self, echo: str, prompt: tuple[int, ...], builder: CompletionLogprobBuilder | None
    ) -> None:
        self._echo: str | None = echo
        self._prompt = prompt
        self._builder = builder

    def add(
        self, text: str, entries: Sequence[TokenLogprob], prompt_entries: PromptLogprobs | None
    ) -> tuple[str, CompletionLogprobs | None]:
        parts: list[CompletionLogprobs] = []
        if self._echo is not None:
            text, self._echo = self._echo + text, None
            if self._builder is not None and prompt_entries is not None:
                parts.append(self._builder.prompt(self._prompt, prompt_entries))
        if self._builder is None:
            return text, None
        return text, joined([*parts, self._builder.output(entries)])


def completion(
    envelope: Envelope, task: CompletionTask, generated: Sequence[Generated], meter: UsageMeter
) -> Completion:
    """All choices of all prompts, in index order; with `best_of` the most likely n of each."""
    sequences = sequences_per_prompt(task.body)
    choices: list[CompletionChoice] = []
    for prompt in range(len(task.prompts)):
        siblings = generated[prompt * sequences : (prompt + 1) * sequences]
        prompt_logprobs = next((s.prompt_logprobs for s in siblings if s.prompt_logprobs), None)
        for sibling in best(siblings, task.body.n):
            text, logprobs = task.choice(prompt).add(
                sibling.text, sibling.logprobs, prompt_logprobs
            )
            choices.append(
                CompletionChoice(
                    index=len(choices),
                    text=text,
                    logprobs=logprobs,
                    finish_reason=wire_finish_reason(sibling.finish_reason),
                )
            )
    return _completion(envelope, choices, usage=usage_body(meter))


def best(siblings: Sequence[Generated], n: int) -> Sequence[Generated]:
    """All of them if there are n, else the n with the highest mean logprob per token."""
    if len(siblings) == n:
        return siblings
    return sorted(siblings, key=_mean_logprob, reverse=True)[:n]


def _mean_logprob(generated: Generated) -> float:
    logprobs = [entry.logprob for entry in generated.logprobs]
    return fmean(logprobs) if logprobs else -inf


class CompletionChunks:
    """The chunks of one streamed completion. Without a `usage` meter none carries usage."""

    def __init__(self, envelope: Envelope, task: CompletionTask, usage: UsageMeter | None) -> None:
        self._envelope = envelope
        self._task = task
        self._usage = usage
        self._choices: dict[int, ChoiceText] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}

    def chunks(self, choice: int, event: OutputEvent) -> Iterable[Completion]:
        prompt = choice // self._task.body.n
        if event.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = event.prompt_logprobs
        if choice not in self._choices:
            self._choices[choice] = self._task.choice(prompt)
        text, logprobs = self._choices[choice].add(
            event.text, event.logprobs, self._prompt_logprobs.get(prompt)
        )
        if text or event.finish_reason is not None or (logprobs is not None and logprobs.tokens):
            yield self._chunk(choice, text, logprobs, event)

    def last_chunks(self) -> Iterable[Completion]:
        if self._usage is not None:
            yield _completion(self._envelope, [], usage=usage_body(self._usage))

    def _chunk(
        self, choice: int, text: str, logprobs: CompletionLogprobs | None, event: OutputEvent
    ) -> Completion:
        ended = event.finish_reason is not None
        body = CompletionChoice(
            index=choice,
            text=text,
            logprobs=logprobs,
            finish_reason=wire_finish_reason(event.finish_reason) if ended else None,
        )
        usage = {} if self._usage is None else {"usage": None}
        return _completion(self._envelope, [body], **usage)


def _completion(envelope: Envelope, choices: list[CompletionChoice], **usage: Any) -> Completion:
    return Completion(
        id=envelope.id,
        object="text_completion",
        created=envelope.created,
        model=envelope.model,
        system_fingerprint=envelope.system_fingerprint,
        choices=choices,
        **usage,
    )

"""OpenAI's text completions, whole and streamed."""

import time
from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf
from statistics import fmean
from typing import Any

from engine.values.output import FinishReason, OutputEvent, TokenLogprob
from server.dialects.dialect import generated, wire_json
from server.dialects.logprobs import CompletionLogprobBuilder, joined
from server.dialects.openai import (
    ChunkWriter,
    ResponseFields,
    chunk_event,
    usage_body,
    wire_finish_reason,
)
from server.generation.completion_task import CompletionTask
from server.generation.engine_requests import sequences_per_prompt
from server.generation.events import Generated
from server.schemas.completions import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
)

PromptLogprobs = Sequence[TokenLogprob | None]


class CompletionBuilder:
    """A StreamingBuilder of text completions."""

    def __init__(self, task: CompletionTask) -> None:
        self.engine = task.model.engine
        self.requests = task.requests
        self.meter = task.meter
        self.is_streamed = task.body.stream
        self.task = task
        self.fields = ResponseFields(
            id=f"cmpl-{task.id}",
            created=int(time.time()),
            model=task.model.name,
            system_fingerprint=task.model.fingerprint,
        )

    def writer(self) -> "CompletionWriter":
        return CompletionWriter(self)

    def new_choice(self) -> Generated:
        return Generated()

    def whole(self, choices: Sequence[Generated]) -> bytes:
        """All choices of all prompts, in index order; with `best_of` the most likely n of each."""
        sequences = sequences_per_prompt(self.task.body)
        rendered: list[CompletionChoice] = []
        for prompt in range(len(self.task.prompts)):
            siblings = choices[prompt * sequences : (prompt + 1) * sequences]
            prompt_logprobs = next((s.prompt_logprobs for s in siblings if s.prompt_logprobs), ())
            for sibling in best(siblings, self.task.body.n):
                text, logprobs = self.text_of(prompt).add(
                    sibling.text, sibling.logprobs, prompt_logprobs
                )
                rendered.append(
                    CompletionChoice(
                        index=len(rendered),
                        text=text,
                        logprobs=logprobs,
                        finish_reason=wire_finish_reason(sibling.finish_reason),
                    )
                )
        completion = Completion(
            id=self.fields.id,
            object="text_completion",
            created=self.fields.created,
            model=self.fields.model,
            system_fingerprint=self.fields.system_fingerprint,
            choices=rendered,
            usage=usage_body(self.meter),
        )
        return wire_json(completion)

    def text_of(self, prompt: int) -> "ChoiceText":
        """A new choice of the prompt with that index."""
        wanted = self.task.body.logprobs is not None
        logprobs = CompletionLogprobBuilder(self.engine.tokenizer) if wanted else None
        return ChoiceText(self.task.echoes[prompt], self.task.prompts[prompt], logprobs)


class ChoiceText:
    """Text and logprobs of one choice, piece by piece. The first piece has the text of the echoed
    prompt. The prompt's logprobs come in as many pieces as the engine sends.
    """

    def __init__(
        self, echo: str, prompt: tuple[int, ...], logprobs: CompletionLogprobBuilder | None
    ) -> None:
        self._echo: str | None = echo
        self._unscored = iter(prompt)
        self._logprobs = logprobs

    def add(
        self, text: str, entries: Sequence[TokenLogprob], prompt_entries: PromptLogprobs
    ) -> tuple[str, CompletionLogprobs | None]:
        if self._echo is not None:
            text, self._echo = self._echo + text, None
        if self._logprobs is None:
            return text, None
        scored = islice(self._unscored, len(prompt_entries))
        of_prompt = self._logprobs.prompt(tuple(scored), prompt_entries)
        return text, joined([of_prompt, self._logprobs.output(entries)])


def best(siblings: Sequence[Generated], n: int) -> Sequence[Generated]:
    """All of them if there are n, else the n with the highest mean logprob per token."""
    if len(siblings) == n:
        return siblings
    return sorted(siblings, key=_mean_logprob, reverse=True)[:n]


def _mean_logprob(choice: Generated) -> float:
    logprobs = [entry.logprob for entry in choice.logprobs]
    return fmean(logprobs) if logprobs else -inf


class CompletionWriter(ChunkWriter):
    """The chunks of one streamed completion."""

    def __init__(self, builder: CompletionBuilder) -> None:
        self._builder = builder
        self._with_usage = builder.task.body.include_usage
        self._choices: dict[int, ChoiceText] = {}

    def events(self, choice: int, events: Sequence[OutputEvent]) -> bytes:
        output = generated(events)
        if not output:
            return b""
        if choice not in self._choices:
            prompt = choice // self._builder.task.body.n
            self._choices[choice] = self._builder.text_of(prompt)
        text, logprobs = self._choices[choice].add(
            "".join(event.text for event in output),
            [entry for event in output for entry in event.logprobs],
            [entry for event in output for entry in event.prompt_logprobs],
        )
        reason = output[-1].finish_reason
        if text or reason is not None or (logprobs is not None and logprobs.tokens):
            return chunk_event(self._chunk(choice, text, logprobs, reason))
        return b""

    def last_chunks(self) -> Iterable[CompletionChunk]:
        if self._with_usage:
            yield self._with_choices([], usage=usage_body(self._builder.meter))

    def _chunk(
        self,
        choice: int,
        text: str,
        logprobs: CompletionLogprobs | None,
        reason: FinishReason | None,
    ) -> CompletionChunk:
        body = CompletionChunkChoice(
            index=choice,
            text=text,
            logprobs=logprobs,
            finish_reason=None if reason is None else wire_finish_reason(reason),
        )
        return self._with_choices([body])

    def _with_choices(self, choices: list[CompletionChunkChoice], **usage: Any) -> CompletionChunk:
        fields = self._builder.fields
        return CompletionChunk(
            id=fields.id,
            object="text_completion",
            created=fields.created,
            model=fields.model,
            system_fingerprint=fields.system_fingerprint,
            choices=choices,
            **usage,
        )

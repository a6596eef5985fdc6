"""Text completions, whole and streamed, and their log-probabilities."""

import codecs
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf
from statistics import fmean
from typing import Any

from engine.values.model import Tokenizer
from engine.values.output import FinishReason, OutputEvent, TokenLogprob
from server.dialects.base import generated, wire_json
from server.dialects.completions.schema import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
)
from server.dialects.logprobs import LOWEST_LOGPROB, token_text
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


class CompletionLogprobBuilder:
    """Logprobs of one choice, whole or chunk by chunk: `text_offset` counts on through chunks.

    Offsets are in characters from the beginning of the choice's text, echoed prompt included; a
    token that continues a character has the offset after that character's beginning.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def prompt(
        self, prompt: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> CompletionLogprobs:
        """The echoed prompt's. Its first token was not predicted: its entries are null."""
        tokens = zip(prompt, entries, strict=True)
        return self._lists([(token_id, entry) for token_id, entry in tokens])

    def output(self, entries: Sequence[TokenLogprob]) -> CompletionLogprobs:
        return self._lists([(entry.token_id, entry) for entry in entries])

    def _lists(self, tokens: Sequence[tuple[int, TokenLogprob | None]]) -> CompletionLogprobs:
        lists = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, entry in tokens:
            token = self._tokenizer.token_bytes(token_id)
            lists.tokens.append(token_text(token))
            lists.text_offset.append(self._characters)
            self._characters += len(self._decoder.decode(token))
            lists.token_logprobs.append(max(entry.logprob, LOWEST_LOGPROB) if entry else None)
            lists.top_logprobs.append(self._top(entry) if entry else None)
        return lists

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Best first, then the token itself; where two read the same the better one stays."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            text = token_text(self._tokenizer.token_bytes(token_id))
            top.setdefault(text, max(logprob, LOWEST_LOGPROB))
        return top


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """The parts' lists one after the other."""
    return CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[logprob for part in parts for logprob in part.token_logprobs],
        top_logprobs=[top for part in parts for top in part.top_logprobs],
        text_offset=[offset for part in parts for offset in part.text_offset],
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

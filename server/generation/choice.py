"""The answer of one sequence: blocks of text, reasoning and calls, put together from its events.

Every dialect writes its streams from the steps in which blocks open, grow and close, and its whole
answers from the blocks themselves.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from engine.values.model import Replay, Tokenizer
from engine.values.output import FinishReason, OutputEvent, TokenLogprob, Usage
from server.generation.history import AssistantTurn, Call
from server.generation.plan import AnswerPlan
from server.parsing.json_text import is_cut_off
from server.parsing.reader import AnswerPart, CallArguments, CallBegun, Content, Reasoning

Remember = Callable[[AssistantTurn, Replay], None]
"""Called with an answer that has tool calls, and with its tokens."""

BlockKind = Literal["text", "reasoning", "call"]

_KINDS: Mapping[type[AnswerPart], BlockKind] = {
    Content: "text",
    Reasoning: "reasoning",
    CallArguments: "call",
}
"""The kind of block that a part is added to."""


@dataclass(slots=True)
class Block:
    """A part of an answer that clients see as one: some text, some reasoning, or a tool call."""

    kind: BlockKind
    index: int  # among the answer's blocks
    call_index: int = 0  # among the answer's calls, of a call
    call_id: str = ""
    name: str = ""  # of the function that is called
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the tokens that hold its text, in a `Choice` that has a tokenizer."""

    @property
    def text(self) -> str:
        """The text so far. The text of a call is its arguments, which are JSON when it is
        complete; see `Choice.cut_off_call`.
        """
        return "".join(self.pieces)


@dataclass(slots=True)
class Opened:
    """A block begins. The one before it has been closed."""

    block: Block


@dataclass(slots=True)
class Grew:
    """A block has got more text."""

    block: Block
    text: str
    logprobs: Sequence[TokenLogprob] = ()  # as in the block


@dataclass(slots=True)
class Closed:
    """A block is complete, or the answer ends within it."""

    block: Block


Step: TypeAlias = Opened | Grew | Closed


@dataclass(frozen=True, slots=True)
class AnswerUsage(Usage):
    """Tokens counted for all sequences of a response: each prompt once."""

    reasoning_tokens: int = 0  # of the completions


class Choice:
    """The answer of one sequence, complete when it has a `finish_reason`.

    A token counts as reasoning if the text that it completes is reasoning or, where it completes
    none, if the text before was. The marker that ends reasoning counts.
    """

    def __init__(
        self,
        plan: AnswerPlan | None = None,
        remember: Remember | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Without a plan all text is content. `tokenizer` is given where each block is to have the
        log-probabilities of its own tokens.
        """
        self.blocks: list[Block] = []
        self.finish_reason: FinishReason | None = None
        self.stopped_by: str | int | None = None
        self.logprobs: list[TokenLogprob] = []  # of all tokens, up to those that were taken
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.cut_off_call: Block | None = None
        """The last block, where the answer ended within a call."""
        self.pooled = b""
        self.admission: Usage | None = None
        self.usage: Usage | None = None
        self.reasoning_tokens = 0
        self.first_output_ns: int | None = None
        """When its first output came, on the clock of `time.perf_counter_ns`."""
        self._plan = plan
        self._parser = None if plan is None else plan.stream()
        self._remember = remember
        self._tokenizer = tokenizer
        self._is_thinking = False
        self._end_of_text = ""  # as much as may begin the marker that ends reasoning
        self._pending: list[TokenLogprob] = []  # of tokens since the last growth
        self._has_functions = plan is not None and bool(plan.functions)
        self._token_ids: list[int] = []  # of an answer that may have calls
        self._texts: list[str] = []

    @property
    def content(self) -> str:
        """The whole text for the user."""
        return "".join(block.text for block in self.blocks if block.kind == "text")

    @property
    def reasoning(self) -> str:
        """The whole reasoning."""
        return "".join(block.text for block in self.blocks if block.kind == "reasoning")

    @property
    def calls(self) -> list[Block]:
        """The tool calls, in order."""
        return [block for block in self.blocks if block.kind == "call"]

    def feed(self, events: Iterable[OutputEvent]) -> list[Step]:
        """Take in the next events. Returns the steps in which the blocks have changed; growth of
        one block is one step, except with log-probabilities, which belong to some of its text.
        """
        steps: list[Step] = []
        for event in events:
            if event.admission is not None:
                self.admission = event.admission
            elif event.read_tokens is None:
                self._take(event, steps)
        return steps

    def take_logprobs(self) -> list[TokenLogprob]:
        """The log-probabilities of the tokens since the last call. They are not kept."""
        taken, self.logprobs = self.logprobs, []
        return taken

    def take_prompt_logprobs(self) -> list[TokenLogprob | None]:
        """The prompt's log-probabilities since the last call. They are not kept."""
        taken, self.prompt_logprobs = self.prompt_logprobs, []
        return taken

    def _take(self, event: OutputEvent, steps: list[Step]) -> None:
        if self.first_output_ns is None:
            self.first_output_ns = time.perf_counter_ns()
        if event.logprobs:
            self.logprobs += event.logprobs
            if self._tokenizer is not None:
                self._pending += event.logprobs
        if event.prompt_logprobs:
            self.prompt_logprobs += event.prompt_logprobs
        if self._parser is None:
            parts: list[AnswerPart] = [Content(event.text)] if event.text else []
        else:
            parts = self._parse(event)
        for part in parts:
            self._grow(part, steps)
        if event.finish_reason is not None:
            self._finish(event, event.finish_reason, steps)

    def _parse(self, event: OutputEvent) -> list[AnswerPart]:
        assert self._parser is not None
        parts = self._parser.add(event.text)
        if event.finish_reason is not None:
            parts += self._parser.finish()
        if self._has_functions:
            self._token_ids += event.token_ids
            self._texts.append(event.text)
        if isinstance(parts[0], Reasoning) if parts else self._is_thinking:
            self.reasoning_tokens += len(event.token_ids)
        if parts:
            self._is_thinking = isinstance(parts[-1], Reasoning)
        if self._is_thinking:
            self._is_thinking = not self._ends_reasoning(event.text)
        else:
            self._end_of_text = ""
        return parts

    def _ends_reasoning(self, text: str) -> bool:
        """Whether the marker that ends reasoning is complete with this text, the latest."""
        marker = self._plan.reasoning_end if self._plan else ""
        if not marker:
            return False
        seen = self._end_of_text + text
        self._end_of_text = seen[-len(marker) :]
        return marker in seen

    def _grow(self, part: AnswerPart, steps: list[Step]) -> None:
        if isinstance(part, CallBegun):
            self._open(Block("call", len(self.blocks), part.index, part.id, part.name), steps)
            self._pending.clear()
            return
        kind = _KINDS[type(part)]
        if not self.blocks or self.blocks[-1].kind != kind:
            self._open(Block(kind, len(self.blocks)), steps)
        block, text = self.blocks[-1], part.text
        block.pieces.append(text)
        logprobs: Sequence[TokenLogprob] = ()
        if self._pending:
            if kind == "text":
                logprobs = self._logprobs_of(text)
                block.logprobs += logprobs
            self._pending.clear()
        last = steps[-1] if steps else None
        if isinstance(last, Grew) and last.block is block and not (logprobs or last.logprobs):
            last.text += text
        else:
            steps.append(Grew(block, text, logprobs))

    def _open(self, block: Block, steps: list[Step]) -> None:
        if self.blocks:
            steps.append(Closed(self.blocks[-1]))
        self.blocks.append(block)
        steps.append(Opened(block))

    def _logprobs_of(self, text: str) -> Sequence[TokenLogprob]:
        """The log-probabilities of the last tokens that hold the text, without those of markers
        before it.
        """
        assert self._tokenizer is not None
        first, n_bytes = len(self._pending), len(text.encode())
        while first and n_bytes > 0:
            first -= 1
            n_bytes -= len(self._tokenizer.token_bytes(self._pending[first].token_id))
        return self._pending[first:]

    def _finish(self, event: OutputEvent, reason: FinishReason, steps: list[Step]) -> None:
        if self.blocks:
            steps.append(Closed(self.blocks[-1]))
        self.finish_reason, self.stopped_by = reason, event.stopped_by
        self.usage, self.pooled = event.usage, event.pooled
        calls = self.calls
        if calls and calls[-1] is self.blocks[-1] and is_cut_off(calls[-1].text):
            self.cut_off_call = calls[-1]
        if reason is not FinishReason.STOP or isinstance(event.stopped_by, str) or not calls:
            return
        assert self._plan is not None
        assert self._remember is not None
        tokens = self._token_ids if event.stopped_by is None else self._token_ids[:-1]
        try:
            turn = AssistantTurn(
                [Call(call.call_id, call.name, json.loads(call.text)) for call in calls],
                self.content,
                self.reasoning,
                self._plan.conversation,
            )
        except (ValueError, RecursionError):
            return  # broken arguments: no client sends them back
        self._remember(turn, self._plan.replay(tokens, "".join(self._texts), self.reasoning))


def answer_usage(choices: Sequence[Choice], sequences_per_prompt: int) -> AnswerUsage:
    """The usage of all sequences of a response: each prompt once, and every sequence's tokens."""
    used = [(index, choice.usage) for index, choice in enumerate(choices) if choice.usage]
    prompts = [usage for index, usage in used if index % sequences_per_prompt == 0]
    return AnswerUsage(
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
        cached_tokens=sum(usage.cached_tokens for usage in prompts),
        completion_tokens=sum(usage.completion_tokens for _, usage in used),
        accepted_draft_tokens=sum(usage.accepted_draft_tokens for _, usage in used),
        rejected_draft_tokens=sum(usage.rejected_draft_tokens for _, usage in used),
        reasoning_tokens=sum(choice.reasoning_tokens for choice in choices),
    )

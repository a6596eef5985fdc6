"""One answer of the engine as a response's output."""

from collections.abc import Sequence

from pydantic_core import to_json

from engine.values.model import Tokenizer
from engine.values.output import FinishReason, OutputEvent, TokenLogprob
from server.dialects.logprobs import chat_logprobs
from server.dialects.responses.output.items import Output
from server.dialects.responses.output.open_items import ItemEvents, Logprobs
from server.generation.answer import ChatAnswer
from server.parsing.parts import Content


class ResponseAnswer:
    """Collects the events of the one sequence that a response has."""

    def __init__(self, answer: ChatAnswer, output: Output, tokenizer: Tokenizer) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._pending: list[TokenLogprob] = []  # of tokens since the last part
        self.output = output

    @property
    def finish_reason(self) -> FinishReason:
        return self._answer.finish_reason

    def add(self, event: OutputEvent) -> None:
        for _ in self.events([event]):
            pass

    def events(self, events: Sequence[OutputEvent]) -> ItemEvents:
        """The events of the output items. With logprobs they are made event by event: of parts that
        were joined it is not known which tokens they are made of.
        """
        if len(events) > 1 and any(event.logprobs for event in events):
            for event in events:
                yield from self.events([event])
            return
        for event in events:
            self._pending += event.logprobs
        for part in self._answer.add_all(events):
            logprobs = self._logprobs(part.text) if isinstance(part, Content) else b""
            yield from self.output.add(part, logprobs)
            self._pending = []
        if (reason := events[-1].finish_reason) is not None:
            is_cut_off = reason is FinishReason.LENGTH
            yield from self.output.close("incomplete" if is_cut_off else "completed")

    def _logprobs(self, text: str) -> Logprobs:
        """Of the last tokens that hold the text; those of markers before it are left out."""
        if not self._pending:
            return b""
        first, n_bytes = len(self._pending), len(text.encode())
        while first and n_bytes > 0:
            first -= 1
            n_bytes -= len(self._tokenizer.token_bytes(self._pending[first].token_id))
        logprobs = chat_logprobs(self._tokenizer, self._pending[first:]).content
        return to_json(logprobs)[1:-1]

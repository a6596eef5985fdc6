"""One answer of the engine as a response's output."""

from collections.abc import Sequence

from pydantic_core import to_json

from engine.types.model import Tokenizer
from engine.types.output import FinishReason, OutputEvent, TokenLogprob
from server.dialects.logprobs import chat_logprobs
from server.dialects.responses.output.items import Output
from server.dialects.responses.output.open_items import Logprobs, News
from server.generation.answer import ChatAnswer
from server.parsing.parts import Content


class ResponseAnswer:
    """Takes in the events of the one sequence that a response has."""

    def __init__(self, answer: ChatAnswer, output: Output, tokenizer: Tokenizer) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._untold: list[TokenLogprob] = []  # of tokens since the last part
        self.output = output

    @property
    def finish_reason(self) -> FinishReason:
        return self._answer.finish_reason

    def add(self, event: OutputEvent) -> None:
        for _ in self.news([event]):
            pass

    def news(self, events: Sequence[OutputEvent]) -> News:
        """Where logprobs were asked for, text has those of its tokens: event by event, since a
        part does not tell how many of many tokens it is made of.
        """
        if len(events) > 1 and any(event.logprobs for event in events):
            for event in events:
                yield from self.news([event])
            return
        for event in events:
            self._untold += event.logprobs
        for part in self._answer.add_all(events):
            logprobs = self._logprobs(part.text) if isinstance(part, Content) else b""
            yield from self.output.add(part, logprobs)
            self._untold = []
        if (reason := events[-1].finish_reason) is not None:
            is_cut_off = reason is FinishReason.LENGTH
            yield from self.output.close("incomplete" if is_cut_off else "completed")

    def _logprobs(self, text: str) -> Logprobs:
        """Of the tokens at the end that hold the text: what markers were made of is not told."""
        if not self._untold:
            return b""
        first, n_bytes = len(self._untold), len(text.encode())
        while first and n_bytes > 0:
            first -= 1
            n_bytes -= len(self._tokenizer.token_bytes(self._untold[first].token_id))
        told = chat_logprobs(self._tokenizer, self._untold[first:]).content
        return to_json(told)[1:-1]

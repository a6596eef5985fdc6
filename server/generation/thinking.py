"""The block of reasoning in one request's answers, before it or already open in the prompt."""

from collections.abc import Sequence

from engine.values.model import Tokenizer
from engine.values.request import ThinkingBlock, ThinkingBudget
from server.errors import UNSUPPORTED, InvalidField
from server.parsing.answer import ReasoningFormat


class Thinking:
    """Whether reasoning is open, over or yet to begin at the end of the prompt, its `tail`."""

    def __init__(self, tokenizer: Tokenizer, format: ReasoningFormat | None, tail: str) -> None:
        self._tokenizer = tokenizer
        self._format = format
        self.is_open = format is not None and tail.rstrip().endswith(format.begin)
        self._is_over = format is None or tail.rstrip().endswith(format.end)
        self.opened = ""
        if format is not None and self.is_open:
            self.opened = tail[tail.rfind(format.begin) :]

    def before_calls(self, calls: Sequence[int]) -> ThinkingBlock | None:
        """The reasoning that may precede calls of such a beginning; None where none may."""
        if self._format is None:
            return None
        block = self._block(self._format.end)
        if block is not None and block.begin[:1] == tuple(calls[:1]):
            return None  # its first token would not tell the one from the other
        return block

    def before_content(self) -> ThinkingBlock | None:
        """The block that may precede content: up to the marker of content, or else of the end of
        reasoning."""
        return self._block(self._format.content or self._format.end) if self._format else None

    def _block(self, end: str) -> ThinkingBlock | None:
        if self._format is None or self._is_over:
            return None
        begin = "" if self.is_open else self._format.begin
        return ThinkingBlock(self._tokens(begin), self._tokens(end), self._space)

    @property
    def _space(self) -> tuple[int, ...]:
        """The line breaks after reasoning that models write and no client is sent, of one token. A
        grammar without them would force the model into text that it never writes."""
        if self._format is None or self._format.content:
            return ()
        lines = (self._tokens("\n"), self._tokens("\n\n"))
        return tuple(tokens[0] for tokens in lines if len(tokens) == 1)

    def budget(self, tokens: int | None) -> ThinkingBudget | None:
        """Raises ApiError (400) for a model that does not reason."""
        if tokens is None:
            return None
        if self._format is None:
            message = "this model has no reasoning that is known"
            raise InvalidField("thinking_budget", message, UNSUPPORTED)
        start = () if self.is_open else self._tokens(self._format.begin)
        end = self._tokens(self._format.end)
        return None if self._is_over else ThinkingBudget(tokens, start, end)

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

"""Encodes conversations by the checkpoint's chat template; callers cannot write control tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from tokenizers import Tokenizer

from engine.text.control_tokens import ControlTokens, new_mark
from engine.text.prompt_limit import PromptLimit
from engine.text.replays import Outline
from engine.text.templates import Template
from engine.values.model import Replay

_REFUSALS = (
    *(TemplateError, TypeError, KeyError, IndexError, AttributeError, RecursionError),
    *(AssertionError, NotImplementedError),  # of mlx-lm's templates in Python
)


class ChatTemplate:
    """Renders conversations and encodes them. Safe in several threads."""

    def __init__(self, template: Template, backend: Tokenizer, limit: PromptLimit) -> None:
        self._template = template
        self._backend = backend
        self._limit = limit
        self._control_tokens = ControlTokens(self._backend)

    def encode(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay],
        arguments: Mapping[str, object],
    ) -> list[int]:
        """See `Tokenizer.apply_chat_template`."""
        if not self._template.source:
            raise ValueError("the model has no chat template; /v1/completions takes any prompt")
        try:
            return self._encode(list(messages), replays, arguments)
        except SecurityError as error:  # it is of no use for these, whatever they say
            raise ValueError(f"the chat template does what no template may: {error}") from error
        except _REFUSALS as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def _encode(
        self,
        messages: list[Any],
        replays: Mapping[int, Replay],
        arguments: Mapping[str, object],
    ) -> list[int]:
        strings = list(_strings([messages, arguments]))
        self._limit.check_characters(sum(map(len, strings)))
        written = self._control_tokens.written_in(list(dict.fromkeys(strings)))
        if not written and not replays:  # nothing to keep apart
            text = self._render(messages, arguments)
            encoding = self._backend.encode_batch_fast([text], add_special_tokens=False)[0]
            return list(encoding.ids)
        mark = new_mark(strings)
        marked = {text: self._control_tokens.marked(text, mark) for text in written}
        shown, arguments = _replaced(messages, marked), _replaced(arguments, marked)
        text = self._render(shown, arguments)
        text, replayed = self._with_stand_ins(text, shown, replays, arguments)
        return self._control_tokens.encode(text, mark, replayed)

    def _with_stand_ins(
        self,
        text: str,
        messages: list[Any],
        replays: Mapping[int, Replay],
        arguments: Mapping[str, object],
    ) -> tuple[str, list[tuple[int, ...]]]:
        """The rendered messages with stand-ins for answers that are replayed, and their tokens."""
        if not replays:
            return text, []
        self._limit.check_tokens(sum(len(replay.tokens) for replay in replays.values()))
        outline = Outline(messages, replays)
        try:
            rendered = self._template.render_any(outline.messages, arguments)
            self._limit.check_text(rendered)
            return outline.spliced(text, rendered, messages, self._control_tokens.replay)
        except (*_REFUSALS, ValueError):  # the template cannot do without the calls
            return text, []

    def _render(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        text = self._template.render(messages, arguments)
        self._limit.check_text(text)
        return text


def _strings(value: object) -> Iterator[str]:
    """All strings in nested lists and mappings, keys included."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield from _strings(key)
                yield from _strings(item)
        case list() | tuple():
            for item in value:
                yield from _strings(item)


def _replaced(value: Any, replacements: Mapping[str, str]) -> Any:
    """The same with other strings, keys included."""
    match value:
        case str():
            return replacements.get(value, value)
        case Mapping():
            return {
                _replaced(key, replacements): _replaced(item, replacements)
                for key, item in value.items()
            }
        case list() | tuple():
            return [_replaced(item, replacements) for item in value]
        case _:
            return value

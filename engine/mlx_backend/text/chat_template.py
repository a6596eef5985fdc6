"""The chat template of a checkpoint: a conversation becomes text, and callers' words stay words."""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engine.mlx_backend.text.control_tokens import ControlTokens, new_mark
from engine.mlx_backend.text.prompt_limit import PromptLimit
from engine.mlx_backend.text.replays import Outline
from engine.types.model import Replay

_REFUSALS = (
    *(TemplateError, TypeError, KeyError, IndexError, AttributeError, RecursionError),
    *(AssertionError, NotImplementedError),  # of mlx-lm's templates in Python
)
_ALLOWING = "{% macro raise_exception(message) %}{% endmacro %}{{ '' }}"
"""Before a template, lets it take any message."""


class ChatTemplate:
    """Renders conversations and encodes them. Safe in several threads."""

    def __init__(self, wrapper: TokenizerWrapper, limit: PromptLimit) -> None:
        self._wrapper = wrapper
        self.source = _source(wrapper)
        self._backend = wrapper.backend_tokenizer
        self._limit = limit
        self._control_tokens = ControlTokens(self._backend)

    def encode(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay],
        arguments: Mapping[str, object],
    ) -> list[int]:
        """See `Tokenizer.apply_chat_template`."""
        if not self._wrapper.has_chat_template:
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
            rendered = self._render(outline.messages, self._allowing(arguments))
            return outline.spliced(text, rendered, messages, self._control_tokens.replay)
        except (*_REFUSALS, ValueError):  # the template cannot do without the calls
            return text, []

    def _allowing(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same for a template that takes any messages: those of an outline lack their calls."""
        if _in_python(self._wrapper):
            return arguments
        template = self._wrapper.get_chat_template(tools=arguments.get("tools"))
        return {**arguments, "chat_template": _ALLOWING + template}

    def _render(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        options = {"add_generation_prompt": True, **arguments}
        said = list(messages)
        if _in_python(self._wrapper):
            options.pop("reasoning_effort", None)  # which Jinja would pass over
            if options.get("tools") and not any(one.get("role") == "system" for one in said):
                said.insert(0, {"role": "system", "content": ""})  # it has them there alone
        text: str = self._wrapper.apply_chat_template(said, tokenize=False, **options)
        self._limit.check_text(text)
        return text


def _in_python(wrapper: TokenizerWrapper) -> bool:
    """Whether the template is one of mlx-lm's own."""
    return wrapper._chat_template is not None


def _source(wrapper: TokenizerWrapper) -> str:
    """The template's text; of several, one behind the other."""
    if _in_python(wrapper):
        return inspect.getsource(sys.modules[wrapper._chat_template.__module__])
    template = wrapper._tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


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

"""The two kinds of chat template that a checkpoint may have, behind one door: `template_of`."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mlx_lm.tokenizer_utils import TokenizerWrapper

_ALLOWING = "{% macro raise_exception(message) %}{% endmacro %}{{ '' }}"
"""Before a Jinja template, lets it take any message."""


class Template(Protocol):
    """Renders conversations. `source` is the template's text."""

    source: str

    def render(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        """The conversation as text, with the beginning of an answer unless the arguments say not.

        Raises whatever the template raises.
        """
        ...

    def render_any(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        """As `render`, and as far as it can without refusing messages that `render` refuses."""
        ...


class JinjaTemplate:
    """The checkpoint's own template, which transformers renders; of several, it chooses one."""

    def __init__(self, wrapper: TokenizerWrapper) -> None:
        self._wrapper = wrapper
        template = wrapper._tokenizer.chat_template
        named = isinstance(template, dict)
        self.source: str = "\n".join(template.values()) if named else template or ""

    def render(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        return _rendered(self._wrapper, messages, arguments)

    def render_any(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        template = self._wrapper.get_chat_template(tools=arguments.get("tools"))
        return self.render(messages, {**arguments, "chat_template": _ALLOWING + template})


class PythonTemplate:
    """A function of mlx-lm's own, for models whose checkpoints have no template in Jinja."""

    def __init__(self, wrapper: TokenizerWrapper) -> None:
        self._wrapper = wrapper
        self.source = inspect.getsource(sys.modules[wrapper._chat_template.__module__])

    def render(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        options = dict(arguments)
        options.pop("reasoning_effort", None)  # an argument that Jinja would pass over
        said = list(messages)
        if options.get("tools") and not any(one.get("role") == "system" for one in said):
            said.insert(0, {"role": "system", "content": ""})  # tools are written there alone
        return _rendered(self._wrapper, said, options)

    def render_any(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        return self.render(messages, arguments)


def template_of(wrapper: TokenizerWrapper) -> Template:
    """The tokenizer's template; where it has none, a JinjaTemplate without text."""
    return JinjaTemplate(wrapper) if wrapper._chat_template is None else PythonTemplate(wrapper)


def _rendered(
    wrapper: TokenizerWrapper, messages: Sequence[Any], arguments: Mapping[str, Any]
) -> str:
    options = {"add_generation_prompt": True, **arguments}
    text: str = wrapper.apply_chat_template(list(messages), tokenize=False, **options)
    return text

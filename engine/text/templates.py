"""The two kinds of chat template that a checkpoint may have, behind one door: `template_of`."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from engine.text.python_templates import python_template
from engine.values.model import TemplateKind

_ALLOWING = "{% macro raise_exception(message) %}{% endmacro %}{{ '' }}"
"""Before a Jinja template, lets it take any message."""


class Template(Protocol):
    """Renders conversations. `source` is the template's text, "" where there is none."""

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
    """The kind's template or else the checkpoint's own, which transformers renders; of several, it
    chooses one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kind: TemplateKind) -> None:
        self._tokenizer = tokenizer
        self._kind = kind
        template = tokenizer.chat_template
        named = isinstance(template, dict)
        own: str = "\n".join(template.values()) if named else template or ""
        self.source = kind.source or own

    def render(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        options = _options(self._kind, arguments)
        if self._kind.source:
            options.setdefault("chat_template", self._kind.source)
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, return_dict=False, **options
        )
        return text

    def render_any(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        own = self._kind.source or None
        template = self._tokenizer.get_chat_template(own, arguments.get("tools"))
        return self.render(messages, {**arguments, "chat_template": _ALLOWING + template})


class PythonTemplate:
    """A function of mlx-lm's own, for models whose checkpoints have no template in Jinja."""

    def __init__(self, kind: TemplateKind) -> None:
        self._kind = kind
        module = _template_module(kind.module)
        self._function: Callable[..., str] = module.apply_chat_template
        self.source = Path(str(module.__file__)).read_text(encoding="utf-8")

    def render(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        options = _options(self._kind, arguments)
        options.pop("reasoning_effort", None)  # an argument that Jinja would pass over
        said = list(messages)
        if options.get("tools") and not any(one.get("role") == "system" for one in said):
            said.insert(0, {"role": "system", "content": ""})  # tools are written there alone
        return self._function(said, **options)

    def render_any(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        return self.render(messages, arguments)


def template_of(tokenizer: PreTrainedTokenizerBase, kind: TemplateKind) -> Template:
    """The tokenizer's template; where it has none, a JinjaTemplate without text."""
    return PythonTemplate(kind) if kind.module else JinjaTemplate(tokenizer, kind)


def _options(kind: TemplateKind, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with the template's own name for whether to think, as mlx-lm has it."""
    options = {"add_generation_prompt": True, **arguments}
    asked = options.pop("enable_thinking", kind.thinks)
    options.setdefault(kind.thinking_argument, asked)
    return options


def _template_module(name: str) -> ModuleType:
    """One of mlx-lm's, without mlx-lm, which would bring MLX into the server's process."""
    spec = spec_from_file_location(f"chat_template_{name}", python_template(name))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

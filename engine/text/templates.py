"""The two kinds of chat template that a checkpoint may have: Jinja, and mlx-lm's in Python."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from engine.values.model import TemplateKind

if TYPE_CHECKING:  # importing transformers takes a second
    from transformers import PreTrainedTokenizerBase

_RAISE_NOTHING = "{% macro raise_exception(message) %}{% endmacro %}{{ '' }}"
"""Put before a Jinja template, it keeps the template from refusing messages."""


class Template(Protocol):
    """Renders conversations. `source` is the template's text, "" if the model has none."""

    source: str

    def render(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        """Render a conversation, with the beginning of an answer unless the arguments say not.

        Raises whatever the template raises.
        """
        ...

    def render_any(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        """Render a conversation without the checks with which the template refuses messages, as far
        as they can be switched off.
        """
        ...


class JinjaTemplate:
    """A template that transformers renders: the kind's own, or else the checkpoint's. transformers
    chooses one if the checkpoint has several.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", kind: TemplateKind) -> None:
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
        return self.render(messages, {**arguments, "chat_template": _RAISE_NOTHING + template})


class PythonTemplate:
    """A function of mlx-lm, for models whose checkpoints have no template in Jinja."""

    def __init__(self, kind: TemplateKind) -> None:
        self._kind = kind
        module = _load_module(kind.module)
        self._function: Callable[..., str] = module.apply_chat_template
        self.source = Path(str(module.__file__)).read_text(encoding="utf-8")

    def render(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        options = _options(self._kind, arguments)
        options.pop("reasoning_effort", None)  # Jinja ignores unknown arguments, a function fails
        shown = list(messages)
        if options.get("tools") and not any(one.get("role") == "system" for one in shown):
            shown.insert(0, {"role": "system", "content": ""})  # the only message that lists tools
        return self._function(shown, **options)

    def render_any(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        return self.render(messages, arguments)


def template_of(tokenizer: "PreTrainedTokenizerBase", kind: TemplateKind) -> Template:
    """The tokenizer's template. If there is none, it is a JinjaTemplate whose source is ""."""
    return PythonTemplate(kind) if kind.module else JinjaTemplate(tokenizer, kind)


def _options(kind: TemplateKind, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with `enable_thinking` under the template's own name, as mlx-lm has it."""
    options = {"add_generation_prompt": True, **arguments}
    thinks = options.pop("enable_thinking", kind.thinks)
    options.setdefault(kind.thinking_argument, thinks)
    return options


def python_template(name: str) -> Path:
    """The file of one of mlx-lm's templates, which may not exist. Does not import mlx-lm, which
    would load MLX.
    """
    package = find_spec("mlx_lm")
    assert package is not None
    assert package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0], "chat_templates", f"{name}.py")


def _load_module(name: str) -> ModuleType:
    """Import one of mlx-lm's templates without mlx-lm, which would load MLX."""
    spec = spec_from_file_location(f"chat_template_{name}", python_template(name))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

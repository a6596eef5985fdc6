"""Command-line options generated from the fields of Settings."""

import shlex
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
import yaml
from pydantic import ByteSize
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from engine.values.settings import Section
from server.settings import Settings, SettingsError, load_settings
from server.terminal.console import UNITS, print_error

IN_YAML_ALONE = frozenset({"models"})  # a list of mappings
USAGE_ERROR = 2
VLLM_FLAGS = {
    "--enable-lora": "--adapter",
    "--enable-prefix-caching": "--prefix-cache, which is the default",
    "--enforce-eager": "--decode eager",
    "--gpu-memory-utilization": "--memory-budget, a size such as 24GiB",
    "--kv-cache-dtype": "--kv-format",
    "--kv-cache-memory-bytes": "--kv-cache-bytes",
    "--lora-modules": "--adapter",
    "--max-num-batched-tokens": "--step-tokens",
    "--max-num-seqs": "--max-running",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--runner": "--pooling",
    "--speculative-config": "--draft-model, or --speculate",
    "--tool-call-parser": "--tool-parser",
}
"""Flags of vLLM, and those that do the same here: https://docs.vllm.ai/en/stable/cli/serve/"""


class SettingsCommand(TyperCommand):
    """A command with options for settings: help has them in sections. It takes no arguments. Errors
    tell the option for a model's name without one, and for a flag of vLLM.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records = {option.name: option.get_help_record(ctx) for option in self.get_params(ctx)}
        for section in (None, *Section):
            shown = [
                record
                for name, record in records.items()
                if record is not None and section_of(name) is section
            ]
            if shown:
                with formatter.section(section or "Options"):
                    formatter.write_dl(shown)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for flag_name in (arg.partition("=")[0] for arg in args):
            if flag_name in VLLM_FLAGS:
                ctx.fail(f"{flag_name} is a flag of vLLM; here it is {VLLM_FLAGS[flag_name]}")
        ctx.allow_extra_args = True
        if extra := super().parse_args(ctx, args):
            name = shlex.quote(extra[0])
            ctx.fail(f"{name} is the value of no option; did you mean --model {name}?")
        return extra


def with_settings(
    names: Collection[str] = frozenset(Settings.model_fields) - IN_YAML_ALONE,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function of Settings into a command with an option for each of these fields.

    An option that is not given leaves the setting to the environment and the YAML file. Further
    parameters of the function are options of their own, listed first.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        _, *others = signature(run).parameters.values()
        own = {other.name for other in others}

        def command(**flags: object) -> None:
            given = {
                name: value
                for name, value in flags.items()
                if name not in own and value not in (None, [])
            }
            run(settings_or_exit(given), **{name: flags[name] for name in own})

        options = others + [
            _option(name, field) for name, field in Settings.model_fields.items() if name in names
        ]
        command.__name__ = run.__name__
        command.__doc__ = run.__doc__
        command.__signature__ = Signature(options)  # type: ignore[attr-defined]  # what Typer reads
        return command

    return decorate


def settings_or_exit(flags: dict[str, Any]) -> Settings:
    """Settings from the given flags. For wrong ones, print a line each and exit with status 2."""
    try:
        return load_settings(flags)
    except SettingsError as error:
        for line in str(error).splitlines():
            print_error(line)
        raise typer.Exit(USAGE_ERROR) from None


def section_of(name: str) -> Section | None:
    """The section of an option; None for those that are no settings, or in no section."""
    field = Settings.model_fields.get(name)
    marks = field.metadata if field is not None else ()
    return next((mark for mark in marks if isinstance(mark, Section)), None)


def value_text(value: object) -> str:
    """A setting's value in YAML."""
    if isinstance(value, ByteSize):
        unit = next((unit for unit, size in UNITS.items() if value and value % size == 0), "")
        return f"{value // UNITS.get(unit, 1)}{unit}"
    if isinstance(value, StrEnum):
        value = str(value)
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The values of a field that is a Literal or an enumeration; none for all others."""
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return tuple(map(str, kind))
    return get_args(kind) if get_origin(kind) is Literal else ()


def flag(name: str, field: FieldInfo) -> str:
    """The flag of a field. A mapping's flag takes one entry at a time, so its name is singular."""
    given = name.removesuffix("s") if _kind(field) is Mapping else name
    return f"--{given.replace('_', '-')}"


def _option(name: str, field: FieldInfo) -> Parameter:
    """The option of a field. Pydantic validates the value: to Typer everything is text, except
    switches and files.
    """
    kind = _kind(field)
    is_repeated = kind in {tuple, Mapping}
    option = typer.Option(
        *([] if kind is bool else [flag(name, field)]),  # Typer has a second name for a switch
        help=_help(field),
        metavar=None if kind is bool else _metavar(field),
        autocompletion=(lambda: list(choices(field))) if choices(field) else None,
    )
    given_as = kind if kind in {bool, Path} else list[str] if is_repeated else str
    annotation = Annotated[given_as | None, option]  # type: ignore[valid-type]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _kind(field: FieldInfo) -> Any:
    """The field's type without None; `tuple` for several strings, `Mapping` for strings by name."""
    origin = get_origin(field.annotation)
    if origin is Literal:
        return str
    if origin in {tuple, Mapping}:
        return origin
    kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
    return kinds[0] if kinds else field.annotation


def _metavar(field: FieldInfo) -> str:
    names = {
        ByteSize: "BYTES",
        Path: "PATH",
        Mapping: "NAME=PATH",
        int: "INTEGER",
        float: "NUMBER",
    }
    return "|".join(choices(field)) or names.get(_kind(field), "TEXT")


def _help(field: FieldInfo) -> str:
    described = field.description or ""
    has_default = field.default not in (None, "", (), {})
    if _kind(field) in {tuple, Mapping}:
        described += " May be given more than once."
    return f"{described} Default: {value_text(field.default)}." if has_default else described

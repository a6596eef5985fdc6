"""`rootstock doctor`: the machine, the memory plan, and a report of measurements."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter
from rich.console import Group, RenderableType
from rich.table import Table

from engine.api import ModelError
from engine.launch import describe_machine, local_checkpoint, tokenizer_of
from engine.values.attention import AttentionTrial, TrialState
from engine.values.model import ModelCard
from engine.values.settings import SMOLLM2_NAME, EngineConfig
from engine.values.stats import ArrayCounts, MachineReport
from measuring.doctor import MeasureConfig, MeasuredCase, Measurements, Section
from measuring.doctor import measure as take_measurements
from server.admin_schema import fact_lines
from server.generation.template import TemplateTraits, traits_of
from server.settings import Settings
from server.terminal.cli import command
from server.terminal.console import (
    TerminalError,
    bytes_text,
    errors_printed,
    facts,
    listing,
    memory_listing,
    show,
)
from server.terminal.flags import SettingsCommand, with_settings

REPORT = "rootstock-measurements"
"""The name of both files of a report, without the suffix."""

_ADAPTER = TypeAdapter(Measurements)


def _writable(folder: Path) -> Path:
    """Check the folder first: ten minutes of measurements must not be lost at the end."""
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise typer.BadParameter(f"{folder} is no folder that can be written to")
    return folder


@partial(command, kind=SettingsCommand)
@with_settings({"config", *(field.name for field in fields(EngineConfig))})
def doctor(
    settings: Settings,
    *,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure for at most ten minutes, and write a report to attach to an issue.",
        ),
    ] = False,
    into: Annotated[
        Path, typer.Option(help="The folder of the report.", callback=_writable)
    ] = Path(),
) -> None:
    """Show what this machine offers a model, its memory and how many tokens the KV cache holds, and
    what the model's chat template takes.

    Without --model it is smollm2 if that has been fetched, else rootstock-demo, which --measure
    takes in any case.

    With --measure: how fast the device attends, decodes and gathers, what memory that takes, and
    whether every architecture passes the check at load. The report has no path, no name of a user,
    a machine or a model, and no text. Ctrl-C ends it early and writes what there is.
    """
    is_default = not measure and not settings.names_models
    if is_default and local_checkpoint(SMOLLM2_NAME) is not None:
        settings = settings.with_default_models()
    model = settings.each_model()[0]
    config = settings.config_of(model)
    with errors_printed(ModelError):  # which MLX raises where it does not start
        report = describe_machine(config)
        if report.problem:
            raise TerminalError(f"cannot serve {model.source}: {report.problem}")
    assert report.card is not None, "a report without a problem has it"
    show(machine_table(report, _template_traits(report.card)))
    if measure:
        _measure(config, into)


def _measure(config: EngineConfig, into: Path) -> None:
    found = take_measurements(MeasureConfig(config), typer.echo)
    for ending, text in (("md", to_markdown(found)), ("json", to_json(found))):
        path = into / f"{REPORT}.{ending}"
        path.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {path}")


def _template_traits(card: ModelCard) -> TemplateTraits | None:
    """What the model's chat template takes; None where there is no template."""
    if not card.generates:
        return None
    tokenizer = tokenizer_of(card)
    return traits_of(tokenizer) if tokenizer.chat_template else None


def machine_table(report: MachineReport, traits: TemplateTraits | None) -> RenderableType:
    """The machine, and the memory plan and the template's traits of the configured model, for a
    report without a problem.
    """
    card = report.card
    assert card is not None, "a report without a problem has it"
    assert report.memory is not None, "a report without a problem has it"
    rows = [
        ("device", card.device),
        (
            "memory",
            f"{bytes_text(report.memory_bytes)}, {bytes_text(report.left_bytes)} not in use",
        ),
        ("BLAS", card.blas),
        ("advice", report.advice),
        ("MLX", f"{report.mlx_version}, mlx-lm {report.mlx_lm_version}"),
        ("images", report.images),
        ("model", card.name),
    ]
    context = f"{card.max_context_tokens:,} tokens"
    longest = card.model_context_tokens
    if longest is not None and card.max_context_tokens < longest:
        context += f" of the model's {longest:,}"
    kv_cache = "none"
    if card.kv_format:
        kv_cache = f"holds {card.arena_tokens:,} tokens, {card.kv_format}"
    rows += [("KV cache", kv_cache), ("context", context)]
    rows += [(line.label, line.text) for line in fact_lines(card)]
    if traits is not None:
        taken = ", ".join(f"{name} {value}" for name, value in asdict(traits).items())
        rows.append(("chat template", taken))
    if report.arrays is not None:
        rows.append(("buffers", _buffers_text(report.arrays)))
    tables = [memory_listing([(card.name, report.memory)])]
    for trial in report.attention:
        tables.append(facts([("attention", f"{trial.kind}: {_ending(trial)}")]))
        if trial.cells:
            tables.append(_times(trial))
    return Group(facts(rows), *tables)


def _buffers_text(arrays: ArrayCounts) -> str:
    """How many buffers a prompt takes, and how far the device's limit is."""
    saved = -(-1000 // arrays.state_tokens) if arrays.of_state else 0
    most = arrays.fixed + arrays.states * arrays.of_state
    taken = "take none"
    if saved:
        taken = (
            f"take {saved * arrays.of_state:,}, of {saved} saved states of {arrays.of_state} arrays"
        )
    return (
        f"1,000 tokens of a prompt {taken}; at most {most:,} are kept, {most / arrays.most:.1%} of "
        f"the {arrays.most:,} that a process may have"
    )


def _ending(trial: AttentionTrial) -> str:
    """How the comparison of attentions for a kind of layer has ended."""
    if trial.state is TrialState.PASSED:
        reasons = [f"not {name}: {why}" for name, why in trial.rejected.items()]
        return "; ".join(["milliseconds a layer, of decodes on this device", *reasons])
    return trial.why or "a comparison has begun and not ended"


def _times(trial: AttentionTrial) -> Table:
    """The times of attentions by rows and keys, and which of them serves."""
    names = list(dict.fromkeys(name for cell in trial.cells for name in cell.milliseconds))
    rows = [
        (
            f"{cell.rows:,} x {cell.keys:,}",
            *(
                _figure(cell.milliseconds[name]) if name in cell.milliseconds else "-"
                for name in names
            ),
            cell.fastest,
        )
        for cell in trial.cells
    ]
    return listing(["rows x keys", *names, "serves"], rows)


def to_json(found: Measurements) -> str:
    """The measurements for programs."""
    return _ADAPTER.dump_json(found, indent=2).decode() + "\n"


def to_markdown(found: Measurements) -> str:
    """The measurements for people: a heading for each section, and under it a table, or a list
    where the section's cases have different figures.
    """
    head = f"# Measurements of Rootstock\n\nTaken in {found.seconds:,.0f} s by `doctor --measure`."
    return "\n\n".join([head, *map(_section, found.sections)]) + "\n"


def _section(section: Section) -> str:
    parts = [f"## {section.name}", section.about]
    if section.cases:
        parts.append("\n".join(_cases(section.cases)))
    ended = f"{section.seconds:,.0f} s" + (f"; {section.cut}" if section.cut else "") + "."
    return "\n\n".join([*parts, ended])


def _cases(cases: Sequence[MeasuredCase]) -> Iterator[str]:
    names = {tuple(case.figures) for case in cases if case.figures}
    if len(names) > 1:
        return _list(cases)
    return _table(cases, next(iter(names), ()))


def _table(cases: Sequence[MeasuredCase], names: Sequence[str]) -> Iterator[str]:
    """A row for each case. Problems are a column where there are any."""
    has_problems = any(case.problem for case in cases)
    yield _line(["case", *map(_words, names), *(["problem"] if has_problems else [])])
    yield _line(["---", *("---:" for _ in names), *(["---"] if has_problems else [])])
    for case in cases:
        figures = [_figure(case.figures[name]) if case.figures else "" for name in names]
        yield _line([case.case, *figures, *([case.problem] if has_problems else [])])


def _list(cases: Sequence[MeasuredCase]) -> Iterator[str]:
    for case in cases:
        yield f"- {case.case}" + (f": {case.problem}" if case.problem else "")
        for name, value in case.figures.items():
            yield f"  - {_words(name)}: {_figure(value)}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _figure(value: float | int | str) -> str:
    """Three digits of a measured figure, all digits of a count."""
    if isinstance(value, str):
        return value or "-"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"

"""Measurements as Markdown for people and as JSON for programs."""

from collections.abc import Iterator, Sequence

from pydantic import TypeAdapter

from measuring.doctor import MeasuredCase, Measurements, Section

_ADAPTER = TypeAdapter(Measurements)


def to_json(found: Measurements) -> str:
    return _ADAPTER.dump_json(found, indent=2).decode() + "\n"


def to_markdown(found: Measurements) -> str:
    """A heading for each section, and under it a table, or a list where its cases differ in what
    they say.
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
    """The problems are a column where there are any."""
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
    """Three digits of what was measured, all of what was counted."""
    if isinstance(value, str):
        return value or "-"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"

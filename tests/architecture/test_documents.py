"""What README, docs, configs and workflows name is there: paths, flags, variables and targets."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from typer.core import TyperGroup

from server.parsing.registry import TOOL_FORMATS
from server.settings import CLIENT_KEY_VARIABLE, ENVIRONMENT_PREFIX, Settings
from server.terminal.cli import SUMMARIES, app

ROOT = Path(__file__).parents[2]
PLACES = (
    *("*.md", "docs/**/*.md", "engine/**/*.md", "configs/**/*.*", "Dockerfile*"),
    ".github/workflows/*.yml",
)
TEXTS = {path: path.read_text("utf-8") for place in PLACES for path in ROOT.glob(place)}

PACKAGES = ("engine", "kvstore", "measuring", "server", "tests")
SOURCES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
INTERNALS = ("docs/internals/*.md", "docs/adr/*.md")

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
COMMANDS = "|".join(SUMMARIES)
COMMAND = re.compile(rf"(?:rootstock (?:{COMMANDS})|make (?:serve|chat|doctor))\b[^`#\n]*")
FLAG = re.compile(r"[\s\"](--[a-z][a-z-]*)")
FLAG_ALONE = re.compile(r"`(--[a-z][a-z-]*)(?=[` =])")
TARGET = re.compile(r"(?:^|`|RUN |run: |\s\s)make ([a-z][a-z-]*)", re.MULTILINE)
ROOMS = "configs|engine|kvstore|load_tests|measuring|server|tests|tools"
FILE = re.compile(rf"`((?:{ROOMS})/[\w/.-]*\w)/?`|`([\w/]*\w\.py)`")
NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`")
VARIABLE = re.compile(rf"{ENVIRONMENT_PREFIX}([A-Z_]*[A-Z])")


def test_links_lead_to_files_and_headings() -> None:
    links = [(path, link) for path, link in found(LINK) if path.suffix == ".md"]
    assert links
    assert not [(path, link) for path, link in links if not leads_somewhere(path, *link)]


def test_files_that_documents_name_are_there() -> None:
    named = [(path, name or end) for path, (name, end) in found(FILE)]
    assert named
    assert not [(path, name) for path, name in named if not is_there(name)]


def test_names_that_internals_use_are_in_the_code() -> None:
    words = set(re.findall(r"\w+", "".join(path.read_text("utf-8") for path in SOURCES)))
    pages = [path for place in INTERNALS for path in ROOT.glob(place)]
    names = [(path, name) for path in pages for name in NAME.findall(TEXTS[path])]
    names = [(path, name) for path, name in names if not name.endswith(".py")]
    assert names
    assert not [(path, name) for path, name in names if not words.issuperset(name.split("."))]


def test_flags_are_those_of_the_command() -> None:
    flags = flags_below(typer.main.get_command(app))
    lines = [(path, words.partition(" -- ")[0]) for path, (words,) in found(COMMAND)]
    said = [(path, line.split()[1], flag) for path, line in lines for flag in FLAG.findall(line)]
    alone = [(path, flag) for path, (flag,) in found(FLAG_ALONE)]
    assert said
    assert alone
    assert not [(path, name, flag) for path, name, flag in said if flag not in flags[name]]
    assert not [(path, flag) for path, flag in alone if flag not in set().union(*flags.values())]


def test_variables_are_settings() -> None:
    variables = [(path, name) for path, (name,) in found(VARIABLE)]
    chat_key = CLIENT_KEY_VARIABLE.removeprefix(ENVIRONMENT_PREFIX)
    known = {name.upper() for name in Settings.model_fields} | {chat_key}
    assert variables
    assert not [(path, name) for path, name in variables if name not in known]


def test_tool_formats_are_named_and_counted() -> None:
    """`generic` is none of a model's own."""
    (listed,) = re.findall(r"set by `--tool-parser`[^:]*: (.*)", TEXTS[ROOT / "docs/api/chat.md"])
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(TOOL_FORMATS)
    counts = [count for _, (count,) in found(re.compile(r"(\d+) (?:tool-call )?formats\b"))]
    assert counts == [str(len(TOOL_FORMATS.keys() - {"generic"}))] * 2


def test_make_has_the_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    said = [(path, name) for path, (name,) in found(TARGET)]
    assert said
    assert not [(path, name) for path, name in said if name not in targets]


def found(pattern: re.Pattern[str]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    for path, text in TEXTS.items():
        for match in pattern.finditer(text):
            yield path, match.groups(default="") or (match[0],)


def is_there(name: str) -> bool:
    """Whether it is a path from the top, or the end of one."""
    return (ROOT / name).exists() or any(path.as_posix().endswith(f"/{name}") for path in SOURCES)


def leads_somewhere(document: Path, link: str, heading: str) -> bool:
    target = document.parent / link if link else document
    return target.exists() and (not heading or heading in anchors(target))


def anchors(document: Path) -> Iterator[str]:
    """What GitHub makes of headings."""
    for title in re.findall(r"^#+ (.+)$", document.read_text("utf-8"), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def flags_below(commands: object) -> dict[str, set[str]]:
    """Of each command, with those of its own commands."""
    assert isinstance(commands, TyperGroup)
    return {name: flags_of(command) for name, command in commands.commands.items()}


def flags_of(command: Any) -> set[str]:
    own = {"--help"}.union(*({*p.opts, *p.secondary_opts} for p in command.params))
    return own.union(*flags_below(command).values()) if isinstance(command, TyperGroup) else own

"""Writes configs/default.yaml and docs/settings.md from the fields of Settings: `make settings`."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from server.settings import Settings
from server.terminal.flags import choices, value_text

ROOT = Path(__file__).parents[1]
WIDTH = 100
YAML_HEAD = """\
# Every setting with its default, written by `make settings` from server/settings/.
# A flag wins over a ROOTSTOCK_* variable, that over this file.
"""
DOCS_HEAD = """\
# Settings

Every setting is a flag of `rootstock serve`, a variable and a name in YAML: `--max-running 8`,
`ROOTSTOCK_MAX_RUNNING=8` or `max_running: 8` in the file that `--config` names. A flag wins over a
variable, that over the file. A switch is turned off by `--no-...`. Bytes may have a unit, such as
`8GiB` or `512MB`. Where several values are allowed the flag is repeated, a variable has commas
between them, and YAML has a list. `adapters` are a mapping of names to folders in YAML, and each
has a flag `--adapter NAME=FOLDER`. A name that is none of these is refused, also as a variable.

This table is written by `make settings` from `server/settings/`.

| setting | default | values | |
| --- | --- | --- | --- |
"""


def reference() -> dict[Path, str]:
    """What each file that is written from Settings shall hold."""
    return {
        ROOT / "configs/default.yaml": YAML_HEAD + "".join(_yaml()),
        ROOT / "docs/settings.md": DOCS_HEAD + "".join(_rows()),
    }


def _yaml() -> Iterator[str]:
    for name, field in Settings.model_fields.items():
        if name != "config":  # the file itself
            comment = fill(f"# {field.description}", WIDTH, subsequent_indent="# ")
            yield f"\n{comment}\n{name}: {value_text(field.default)}\n"


def _rows() -> Iterator[str]:
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (None, "", (), {}) else f"`{value_text(field.default)}`"
        values = ", ".join(choices(field)) or " ".join(_limits(field))
        yield f"| `{name}` | {default} | {values} | {field.description} |\n"


def _limits(field: FieldInfo) -> Iterator[str]:
    for limit in field.metadata:
        match limit:
            case Gt(lowest):
                yield f"above {lowest}"
            case Ge(lowest):
                yield f"from {lowest}"
            case Le(highest):
                yield f"to {highest:,}"


def main() -> None:
    for path, text in reference().items():
        path.write_text(text, "utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

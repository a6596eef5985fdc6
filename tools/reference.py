"""Writes configs/default.yaml and docs/settings.md from the fields of Settings, and docs/metrics.md
from the tables of `/metrics`: `make reference`.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from annotated_types import Ge, Gt, Le
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from engine.values.settings import Section
from engine.values.stats import DISK_FAULTS
from server.metrics.metrics import BATCHES, GUARD, HTTP, SAMPLE_SUFFIXES, Row
from server.metrics.tables import TABLES, vllm_tables
from server.settings import Settings
from server.terminal.flags import choices, section_of, value_text

ROOT = Path(__file__).parents[1]
WIDTH = 100
YAML_HEAD = """\
# Every setting with its default, written by `make reference`.
# A flag wins over a ROOTSTOCK_* variable, that over this file.
"""
DOCS_HEAD = """\
# Settings

Every setting is a flag of `rootstock serve`, a variable and a name in the YAML file of `--config`:
`--max-running 8`, `ROOTSTOCK_MAX_RUNNING=8`, `max_running: 8`. Flags override variables, variables
the file. `--no-...` turns a switch off. Bytes may have a unit (`8GiB`, `512MB`). Several values:
repeat the flag, separate by commas in a variable, or use a YAML list. `adapters` is a YAML mapping,
or flags `--adapter NAME=FOLDER`. Unknown names are refused, also as variables.

This page is written by `make reference` from `server/settings/` and `engine/values/settings.py`.
"""
SETTINGS_TABLE = """
## {section}

| setting | default | values | |
| --- | --- | --- | --- |
"""
GENERAL = "General"
"""The heading of the settings that are in no section of `--help`."""

METRICS_HEAD = """\
# Metrics

`GET /metrics` serves these in Prometheus' text format, without an API key.
[monitoring.md](monitoring.md) has the queries and alerts. All metrics but those of HTTP, of images,
of batches and of the memory guard also have the label `model`, the model's own name. Histograms
also have `_sum` and `_count`. Without a disk cache there are no metrics of the disk, without
`kv_events` none of KV events, without `batches` none of batches, and where the machine's memory is
not watched none of the guard.

This page is written by `make reference` from `server/metrics/`.

"""
VLLM_HEAD = """
## vLLM's names

These repeat figures under vLLM's names, with the label `model_name`; `vllm_metric_names: false`
turns them off. The histograms of `vllm:request_...` except queue times have no other name, and
count sequences that ended with `stop` or `length`. `promtool check metrics` warns about the colons.

"""
METRICS_NOTES = """
- Received sequences are the refused, the finished and the live ones. If a client leaves before its
  answer begins, the status is 499; its sequences finish as `abort`.
- `route` is the path's template, or `other` for unknown paths and requests refused before routing.
  Most answers with status 400 never reach an engine and appear in the HTTP metrics only.
- Reasons of `rootstock_access_refused_total`: `invalid_key`, `role`, `concurrency`,
  `requests_per_minute`, `tokens_per_minute`, `foreign_host`, `foreign_origin`, `memory`.
- A block shared by eight sequences adds seven to `rootstock_kv_saved_blocks`.
- Warmed prompts count neither as queries nor as hits of the prefix cache.
- `rootstock_prefix_hit_ratio` has no sample for a window without lookups.
"""
METRICS_TABLE = """\
| metric | type | |
| --- | --- | --- |
"""


def reference() -> dict[Path, str]:
    """The text of each file that is generated from the code."""
    return {
        ROOT / "configs/default.yaml": YAML_HEAD + "".join(_yaml()),
        ROOT / "docs/settings.md": DOCS_HEAD + "".join(_tables()),
        ROOT / "docs/metrics.md": _metrics(),
    }


def _metrics() -> str:
    own: list[Row[Any]] = [
        *HTTP,
        *BATCHES,
        *GUARD,
        *(row for table in TABLES for row in table.rows),
    ]
    vllm = [row for table in vllm_tables({}) for row in table.rows]
    parts = (METRICS_HEAD, METRICS_TABLE, *_families(own), METRICS_NOTES)
    faults = ", ".join(f"`{fault}`" for fault in DISK_FAULTS)
    names = "".join(f"- `{_series(row)}`\n" for row in vllm)
    return "".join((*parts, f"- Faults of the disk cache: {faults}.\n", VLLM_HEAD, names))


def _families(rows: Iterable[Row[Any]]) -> Iterator[str]:
    for row in rows:
        yield f"| `{_series(row)}` | {row.kind} | {row.documentation} |\n"


def _series(row: Row[Any]) -> str:
    """The name and labels of a metric's samples; of a histogram, those of its buckets."""
    name, _, own_labels = row.name.rstrip("}").partition("{")
    is_histogram = row.kind == "histogram"
    suffix = "_bucket" if is_histogram else SAMPLE_SUFFIXES[row.kind]
    labels = "le" if is_histogram else own_labels
    return f"{name}{suffix}" + (f"{{{labels}}}" if labels else "")


def _sections() -> Iterator[tuple[str, Mapping[str, FieldInfo]]]:
    """The headings in the order of `--help`, and the settings below each."""
    for section in (None, *Section):
        fields = Settings.model_fields.items()
        yield (
            section or GENERAL,
            {name: field for name, field in fields if section_of(name) is section},
        )


def _yaml() -> Iterator[str]:
    for heading, fields in _sections():
        yield f"\n\n# {heading}\n# {'-' * len(heading)}\n"
        for name, field in fields.items():
            if name != "config":  # the file itself
                comment = fill(f"# {field.description}", WIDTH, subsequent_indent="# ")
                yield f"\n{comment}\n{name}: {value_text(field.default)}\n"


def _tables() -> Iterator[str]:
    for heading, fields in _sections():
        yield SETTINGS_TABLE.format(section=heading)
        yield from _rows(fields)


def _rows(fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    for name, field in fields.items():
        default = "" if field.default in (None, "", (), {}) else f"`{value_text(field.default)}`"
        values = ", ".join(choices(field)) or " ".join(_limits(field))
        yield f"| `{name}` | {default} | {values} | {field.description} |\n"


def _limits(field: FieldInfo) -> Iterator[str]:
    for limit in field.metadata:
        match limit:
            case Gt(lowest):
                yield f"above {lowest}"
            case Ge(int(lowest)) if field.annotation is ByteSize:
                yield f"from {value_text(ByteSize(lowest))}"
            case Ge(lowest):
                yield f"from {lowest}"
            case Le(highest):
                yield f"to {highest:,}"


def main() -> None:
    """Write the files."""
    for path, text in reference().items():
        path.write_text(text, "utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

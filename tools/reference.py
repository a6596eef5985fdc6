"""Writes configs/default.yaml and docs/settings.md from the fields of Settings, and docs/metrics.md
from the tables of `/metrics`: `make reference`.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from engine.values.stats import DISK_FAULTS
from server.metrics.metrics import HTTP, SAMPLE_SUFFIXES, Row
from server.metrics.tables import TABLES, vllm_tables
from server.settings import Settings
from server.terminal.flags import choices, value_text

ROOT = Path(__file__).parents[1]
WIDTH = 100
YAML_HEAD = """\
# Every setting with its default, written by `make reference` from server/settings/.
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

This table is written by `make reference` from `server/settings/`.

| setting | default | values | |
| --- | --- | --- | --- |
"""
METRICS_HEAD = """\
# Metrics

`GET /metrics` serves these in Prometheus' text format, without an API key.
[monitoring.md](monitoring.md) has the queries and alerts. All metrics but the first three also have
the label `model`, the model's own name. Histograms also have `_sum` and `_count`. Without a disk
cache there are no metrics of the disk.

This page is written by `make reference` from `server/metrics/`.

"""
VLLM_HEAD = """
## vLLM's names

These repeat the same figures under vLLM's names, for dashboards made for it;
`vllm_metric_names: false` turns them off. Their label for the model is `model_name`. The histograms
of token counts and of prefill, decode and output-token times exist under these names alone; they
count sequences that ended with `stop` or `length`. `promtool check metrics` warns about the colons.

"""
METRICS_NOTES = """
- Received sequences are the refused, the finished and the live ones together. A client that leaves
  before its answer begins has status 499, here and in the log; its sequences finish as `abort`.
- `route` is the path's template. It is `other` for paths that do not exist, and for requests that
  are refused before routing, such as one with a wrong key. Most answers with status 400 never
  reach an engine, so only the metrics of HTTP count them.
- Reasons of `rootstock_access_refused_total`: `invalid_key`, `role`, `concurrency`,
  `requests_per_minute`, `tokens_per_minute`, `foreign_host`, `foreign_origin`.
- A block that eight sequences share counts seven times in `rootstock_kv_saved_blocks`, and one that
  only the tree holds not at all.
- Prompts that are computed in advance count neither as queries nor as hits of the prefix cache.
- `rootstock_prefix_hit_ratio` has no sample for a window without lookups.
"""
METRICS_TABLE = """\
| metric | type | |
| --- | --- | --- |
"""


def reference() -> dict[Path, str]:
    """What each file that is written from the code shall hold."""
    return {
        ROOT / "configs/default.yaml": YAML_HEAD + "".join(_yaml()),
        ROOT / "docs/settings.md": DOCS_HEAD + "".join(_rows()),
        ROOT / "docs/metrics.md": _metrics(),
    }


def _metrics() -> str:
    own = [row for rows in (HTTP, *(table.rows for table in TABLES)) for row in rows]
    vllm = [row for table in vllm_tables({}) for row in table.rows]
    parts = (METRICS_HEAD, METRICS_TABLE, *_families(own), METRICS_NOTES)
    faults = ", ".join(f"`{fault}`" for fault in DISK_FAULTS)
    vllm_parts = (VLLM_HEAD, METRICS_TABLE, *_families(vllm))
    return "".join((*parts, f"- Faults of the disk cache: {faults}.\n", *vllm_parts))


def _families(rows: Iterable[Row[Any]]) -> Iterator[str]:
    for row in rows:
        name, _, own_labels = row.name.rstrip("}").partition("{")
        is_histogram = row.kind == "histogram"
        suffix = "_bucket" if is_histogram else SAMPLE_SUFFIXES[row.kind]
        labels = "le" if is_histogram else own_labels
        series = f"{name}{suffix}" + (f"{{{labels}}}" if labels else "")
        yield f"| `{series}` | {row.kind} | {row.documentation} |\n"


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

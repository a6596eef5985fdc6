"""The queries of a Grafana dashboard, as Grafana sends them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load_tests.client import TargetError

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "configs/grafana-dashboard.json"

VARIABLE = re.compile(r"\$\{?(\w+)\}?")
LABEL_VALUES = re.compile(r"label_values\((.+),\s*(\w+)\)")


@dataclass(frozen=True, slots=True)
class Query:
    """One line of a panel, in PromQL."""

    panel: str
    expression: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a variable's values come from: a label of some series."""

    variable: str
    series: str
    label: str


def read(path: Path = DASHBOARD) -> dict[str, Any]:
    """The dashboard's JSON."""
    return dict(json.loads(path.read_text()))


def queries(dashboard: Mapping[str, Any], rate_interval: str) -> list[Query]:
    """Of all panels, with every variable at "All". Raises TargetError for one without a query, or
    with a variable that the dashboard does not have.
    """
    values = {"__rate_interval": rate_interval}
    for variable in dashboard["templating"]["list"]:
        if variable.get("includeAll"):
            values[variable["name"]] = variable["allValue"]
    found = []
    for panel in _panels(dashboard):
        if not panel.get("targets"):
            raise TargetError(f"{panel['title']}: a panel without a query")
        found += [Query(panel["title"], _filled(one["expr"], values)) for one in panel["targets"]]
    return found


def choices(dashboard: Mapping[str, Any]) -> list[Choice]:
    """Of the variables that a query fills."""
    found = []
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            match = LABEL_VALUES.fullmatch(variable["query"]["query"])
            if match is None:
                raise TargetError(f"{variable['name']}: not label_values(series, label)")
            found.append(Choice(variable["name"], *match.groups()))
    return found


def _panels(holder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A row that is folded holds its panels."""
    for panel in holder.get("panels", ()):
        if panel["type"] == "row":
            yield from _panels(panel)
        else:
            yield panel


def _filled(expression: str, values: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise TargetError(f"{expression}: there is no variable {match[1]}")
        return values[match[1]]

    return VARIABLE.sub(value, expression)

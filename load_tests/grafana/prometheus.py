"""A Prometheus of its own, with the configuration of configs/, that scrapes one daemon.

HTTP API: https://prometheus.io/docs/prometheus/latest/querying/api/
"""

import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from load_tests.client import TargetError
from load_tests.grafana.dashboard import ROOT
from load_tests.processes import free_port, running

CONFIGURATION = ROOT / "configs/prometheus/prometheus.yml"
LOG = Path("build/load_tests/prometheus.log")
SCRAPE_SECONDS = 1
RATE_INTERVAL = f"{4 * SCRAPE_SECONDS}s"
"""What Grafana puts for $__rate_interval: four scrapes."""

START_SECONDS = 60.0
EVALUATION_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Rule:
    """An alert. `health` is "ok" once it has been evaluated without an error."""

    name: str
    health: str
    error: str


@dataclass(frozen=True, slots=True)
class Prometheus:
    """Every method raises TargetError for what it refuses."""

    http: httpx.Client

    def values(self, expression: str, since: float, until: float) -> list[float]:
        """Of all series at all times, those that are numbers."""
        found = self._asked("query_range", query=expression, start=since, end=until, step=1)
        values = [float(value) for series in found["result"] for _, value in series["values"]]
        return [value for value in values if math.isfinite(value)]

    def label_values(self, label: str, series: str) -> list[str]:
        return list(self._asked(f"label/{label}/values", **{"match[]": series}))

    def rules(self) -> list[Rule]:
        """Once all have been evaluated."""
        deadline = time.monotonic() + EVALUATION_SECONDS
        while True:
            groups = self._asked("rules")["groups"]
            rules = [
                Rule(rule["name"], rule["health"], rule.get("lastError", ""))
                for group in groups
                for rule in group["rules"]
            ]
            if "unknown" not in {rule.health for rule in rules} or time.monotonic() > deadline:
                return rules
            time.sleep(SCRAPE_SECONDS)

    def _asked(self, path: str, **parameters: str | float) -> Any:
        try:
            answer = self.http.get(f"/api/v1/{path}", params=parameters)
            content = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise TargetError(f"Prometheus' {path}: {error!r}") from error
        if content["status"] != "success":
            raise TargetError(f"{parameters.get('query', path)}: {content['error']}")
        return content["data"]


def installed() -> str | None:
    """The program, if this machine has it."""
    return shutil.which("prometheus")


@contextmanager
def scraping(program: str, daemon: str) -> Iterator[Prometheus]:
    """Prometheus, which looks at the daemon ("host:port") every second. Raises TargetError."""
    address = f"127.0.0.1:{free_port()}"
    url = f"http://{address}"
    with (
        tempfile.TemporaryDirectory() as folder,
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        file = Path(folder, "prometheus.yml")
        file.write_text(yaml.safe_dump(configuration(daemon)))
        command = (
            program,
            f"--config.file={file}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
            "--log.level=warn",
        )
        with running(command, f"{url}/-/ready", LOG, START_SECONDS):
            yield Prometheus(http)


def configuration(daemon: str) -> dict[str, Any]:
    """That of configs/, hurried, and for another daemon."""
    written = yaml.safe_load(CONFIGURATION.read_text())
    interval = f"{SCRAPE_SECONDS}s"
    for job in written["scrape_configs"]:
        job |= {"scrape_interval": interval, "static_configs": [{"targets": [daemon]}]}
    rules = [str(CONFIGURATION.parent / name) for name in written["rule_files"]]
    return {**written, "rule_files": rules, "global": {"evaluation_interval": interval}}

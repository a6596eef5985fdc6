"""The conditions of a measurement: machine, software and command line."""

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from measuring.doctor import package_versions


@dataclass(frozen=True, slots=True)
class Conditions:
    """Everything that is needed to repeat a measurement."""

    command: str
    seed: int
    servers: tuple[str, ...]  # their command lines, with {model} and {port}
    processor: str
    cores: int
    memory_bytes: int
    load_average: float  # over the minute before the start: near 0 on a quiet machine
    system: str
    blas: str
    versions: dict[str, str]

    def lines(self) -> list[str]:
        """The conditions as lines of text."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return [
            f"{self.processor}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB; "
            f"{self.system}; load average before: {self.load_average:.2f}",
            f"BLAS: {self.blas}; {versions}; seed {self.seed}",
            *self.servers,
            self.command,
        ]


def observe(
    seed: int,
    servers: tuple[str, ...],
    blas: str,
    others: Mapping[str, str] = MappingProxyType({}),
) -> Conditions:
    """This process's machine, packages and command line; `others` are versions of more packages."""
    return Conditions(
        command=" ".join(("python", *sys.orig_argv[1:])),
        seed=seed,
        servers=servers,
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        load_average=os.getloadavg()[0],
        system=f"{platform.system()} {platform.machine()}",
        blas=blas,
        versions={"python": platform.python_version(), **package_versions(), **others},
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

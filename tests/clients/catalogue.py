"""Which clients there are, where each is installed, and how its script is started.

Every file of requirements/ makes one: a .txt names packages of PyPI, a .json those of npm. The
script of its name is in python/, for a library; in node/, likewise; or in programs/, where it is
Python of ours that starts a program.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ENVIRONMENTS = ROOT / ".clients"


@dataclass(frozen=True)
class Client:
    requirements: Path

    @property
    def name(self) -> str:
        return self.requirements.stem

    @property
    def environment(self) -> Path:
        """Where `make clients` installs the requirements."""
        return ENVIRONMENTS / self.name

    @property
    def is_installed(self) -> bool:
        return (self.environment / ".installed").exists()

    @property
    def command(self) -> tuple[str, ...]:
        """Runs the script from the root of the repository. The daemon's URL and model follow."""
        if (HERE / f"python/{self.name}.py").exists():
            python = self.environment / "bin/python"
            return (str(python), "-m", f"tests.clients.python.{self.name}")
        if (script := HERE / f"node/{self.name}.mjs").exists():
            return ("node", str(script))
        return (sys.executable, "-m", f"tests.clients.programs.{self.name}")


CLIENTS = {path.stem: Client(path) for path in sorted((HERE / "requirements").iterdir())}

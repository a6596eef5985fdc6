"""`make install-service`: makes the daemon of this clone a service of this user, and starts it."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

CONFIGS = Path(__file__).parents[1] / "configs"
FIRST_CONFIG = """\
# Settings of the Rootstock service; docs/settings.md lists them. For example:
# model: mlx-community/Qwen3-4B-4bit    # instead of smollm2 and rootstock-demo
"""

Run = Callable[[Sequence[str]], None]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Manager:
    """A platform's service manager: its file for the service, how it quotes, and its commands."""

    check: tuple[str, ...]  # a command that fails where the manager does not run
    template: str  # in configs/
    target: Path
    quoted: Callable[[str], str]
    commands: tuple[tuple[str, ...], ...]
    advice: tuple[str, ...]


def systemd(home: Path) -> Manager:
    """systemd's manager of the user with this home."""
    systemctl = ("systemctl", "--user")
    return Manager(
        check=(*systemctl, "show-environment"),
        template="rootstock.service",
        target=home / ".config/systemd/user/rootstock.service",
        quoted=_systemd_quoted,
        commands=(
            (*systemctl, "daemon-reload"),
            (*systemctl, "enable", "rootstock"),
            (*systemctl, "restart", "rootstock"),
        ),
        advice=(
            "log: journalctl --user --unit rootstock --follow",
            "to start it with the machine instead of your session: loginctl enable-linger",
            "to remove it: systemctl --user disable --now rootstock",
        ),
    )


def launchd(home: Path) -> Manager:
    """launchd for the user with this home, on macOS."""
    target = home / "Library/LaunchAgents/rootstock.plist"
    domain = f"gui/{os.getuid()}"
    # `bootout` fails where no earlier one runs, and returns before that one has drained.
    replace = (
        f"launchctl bootout {domain}/rootstock 2>/dev/null; "
        f"while launchctl print {domain}/rootstock >/dev/null 2>&1; do sleep 1; done; "
        f"launchctl bootstrap {domain} {shlex.quote(str(target))}"
    )
    return Manager(
        check=("launchctl", "print", domain),
        template="rootstock.plist",
        target=target,
        quoted=escape,
        commands=(("sh", "-c", replace),),
        advice=(
            f"log: tail -f {_log(home)}",
            f"to remove it: launchctl bootout {domain}/rootstock; rm {shlex.quote(str(target))}",
        ),
    )


MANAGERS: Mapping[str, Callable[[Path], Manager]] = {"linux": systemd, "darwin": launchd}


def install(manager: Manager, home: Path, command: Path, run: Run, say: Say) -> None:
    """Write the service's file, and a YAML file of settings if there is none; then start it."""
    config = home / ".config/rootstock/rootstock.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    if not config.exists():
        config.touch(mode=0o600)  # an API key may be written into it
        config.write_text(FIRST_CONFIG)
        say(f"wrote {config}: its settings")
    values = {"@COMMAND@": command, "@CONFIG@": config, "@LOG@": _log(home)}
    text = (CONFIGS / manager.template).read_text("utf-8")
    for name, value in values.items():
        text = text.replace(name, manager.quoted(str(value)))
    manager.target.parent.mkdir(parents=True, exist_ok=True)
    manager.target.write_text(text, "utf-8")
    say(f"wrote {manager.target}")
    for words in manager.commands:
        say(f"running {shlex.join(words)}")
        run(words)
    for line in manager.advice:
        say(line)


def problem(manager: Manager) -> str:
    """Why the manager cannot start a service; empty if it can."""
    name = manager.check[0]
    try:
        checked = subprocess.run(manager.check, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"there is no {name} here ({error.strerror})"
    if checked.returncode:
        said = " ".join(checked.stderr.split()) or f"status {checked.returncode}"
        return f"no {name} runs for this user ({shlex.join(manager.check)}: {said})"
    return ""


def _log(home: Path) -> Path:
    return home / "Library/Logs/rootstock.log"


def _systemd_quoted(text: str) -> str:
    """One word of a command line: systemd.unit(5) would expand what follows a percent sign."""
    return '"' + text.replace("%", "%%") + '"'


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    """Install the service, or exit with the reason why that is not possible."""
    if sys.platform not in MANAGERS:
        sys.exit(f"there is no service to install on {sys.platform}")
    home = Path.home()
    manager = MANAGERS[sys.platform](home)
    if reason := problem(manager):
        sys.exit(
            f"{reason}, so nothing was installed. Start the daemon by a program that runs here: "
            f"{Path(sys.executable).with_name('rootstock')} serve"
        )
    try:
        install(manager, home, Path(sys.executable).with_name("rootstock"), _run, print)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {shlex.join(error.cmd)} ended with {error.returncode}")
    except OSError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

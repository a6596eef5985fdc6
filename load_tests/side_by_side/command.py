"""`python -m load_tests compare`: Rootstock and other servers, one after the other, again and
again.
"""

import logging
from pathlib import Path
from typing import Annotated

import typer

from engine.mlx_backend.blas import load_blas
from load_tests.checkpoint import served_checkpoint
from load_tests.conditions import observe
from load_tests.peers.catalogue import (
    Peer,
    foreign_versions,
    mlx_lm,
    mlx_vlm,
    rootstock,
    vllm_mlx,
)
from load_tests.report import Table
from load_tests.scenarios.kinds import (
    Playable,
    Restarting,
    load_scenario,
    scenario_names,
    text_scenario_names,
)
from load_tests.scenarios.option import Scenarios
from load_tests.side_by_side import record as records
from load_tests.side_by_side.record import Record
from load_tests.side_by_side.rounds import Bench, play_rounds
from load_tests.side_by_side.tables import tables
from load_tests.side_by_side.text_tables import short_table, text_table
from load_tests.terminal import fail, show

RESULTS = Path("build/load_tests/results")
QUICK_RESULTS = Path("build/load_tests/quick")

logger = logging.getLogger("load_tests")

Folder = Annotated[Path | None, typer.Option(help="Where the results are kept, a file each.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a README.")]


def compare(
    *,
    scenario: Scenarios = None,
    model: Annotated[
        str,
        typer.Option(
            "--checkpoint",
            help="What all serve: a shape, a directory or a model's name; the scenario's own.",
        ),
    ] = "",
    without: Annotated[
        list[str] | None, typer.Option(help="A server to leave out, such as vllm_mlx.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each server per scenario.")] = 3,
    is_quick: Annotated[
        bool, typer.Option("--quick", help="One run with hardly any work, for trying it.")
    ] = False,
    flag: Annotated[
        list[str] | None,
        typer.Option(help="Compare with Rootstock under these flags, not with other servers."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Compare with Rootstock of this checkout, not with other servers."),
    ] = None,
    peer_listen_queue: Annotated[
        int | None,
        typer.Option(help="Connections that may wait for mlx_lm.server; see mlx_lm_server.py."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    into: Folder = None,
    markdown: Markdown = False,
) -> None:
    """Start Rootstock and its peers in turn; keep what they did, and print it beside each other."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    folder = into or (QUICK_RESULTS if is_quick else RESULTS)
    kept = []
    for name in scenario or text_scenario_names():
        called, played = _chosen(name, model, tuple(flag or ()), peer_listen_queue)
        others = tuple(other for other in played.others if other not in (without or ()))
        played = played.model_copy(update={"others": others})
        logger.info("%s: %s", called, played.description)
        peers = _peers(played) if against is None else _commits(against.resolve())
        if is_quick:
            kept.append(_record(called, played.quick(), peers, seed, repeat=1))
        else:
            kept.append(_record(called, played, peers, seed, repeat))
        records.write(kept[-1], folder)
    show(kept[0].conditions, markdown, *_tables(kept))
    failures = [(record.name, failure) for record in kept for failure in record.results.failures]
    for name, failure in failures:
        fail(f"{name}: {failure.peer}: {failure.reason}")
    raise typer.Exit(1 if failures else 0)


def results(*, into: Folder = None, markdown: Markdown = False) -> None:
    """Print what `compare` has kept."""
    folder = into or RESULTS
    kept = records.read(folder, scenario_names())
    if not kept:
        raise typer.Exit(fail(f"{folder} has no results"))
    show(kept[0].conditions, markdown, *_tables(kept))


def _tables(kept: list[Record]) -> list[Table]:
    texts = [table for table in (short_table(kept), text_table(kept)) if table.rows]
    return [*texts, *tables(kept)]


def _chosen(
    name: str, model: str, flags: tuple[str, ...], listen_queue: int | None
) -> tuple[str, Playable | Restarting]:
    """The scenario, what the command line says in place of its own, and then under another name."""
    told = {"checkpoint": model, "beside": flags, "listen_queue": listen_queue}
    changes = {key: value for key, value in told.items() if value}
    called = [
        name,
        *(f"{key}={Path(str(value)).name}" for key, value in changes.items() if key != "beside"),
        *flags,
    ]
    return "-".join(called), load_scenario(name).model_copy(update=changes)


def _record(
    name: str,
    scenario: Playable | Restarting,
    peers: tuple[Peer, ...],
    seed: int,
    repeat: int,
) -> Record:
    model = served_checkpoint(scenario.checkpoint)
    commands = tuple(peer.described for peer in peers)
    blas = load_blas().brief or "the system's"
    conditions = observe(seed, commands, blas, foreign_versions(peers))
    found = play_rounds(Bench(model, model.parent), peers, scenario, seed, repeat)
    return Record(name, scenario, conditions, tuple(peer.name for peer in peers), found)


def _peers(scenario: Playable | Restarting) -> tuple[Peer, ...]:
    """Ours first."""
    if isinstance(scenario, Restarting):
        return (rootstock(*scenario.flags),)
    if scenario.beside:
        return rootstock(), rootstock(*scenario.beside)
    others = {
        "mlx_lm": mlx_lm(listen_queue=scenario.listen_queue),
        "vllm_mlx": vllm_mlx(),
        "mlx_vlm": mlx_vlm(),
    }
    return rootstock(), *(others[name] for name in scenario.others)


def _commits(other: Path) -> tuple[Peer, ...]:
    return rootstock(), rootstock(directory=other)

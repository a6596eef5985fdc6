"""Records as plots: SVG, small enough for a README."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from load_tests.scenarios.arrival import Arrived, Gap
from load_tests.scenarios.kinds import Arrival, Load, Shares
from load_tests.scenarios.load import Summary
from load_tests.scenarios.shares import Probed
from load_tests.side_by_side.record import Record
from load_tests.side_by_side.tables import runs_of, share_seconds

SIZE_INCHES = (6.4, 3.4)
COLOURS = ("#0b6e4f", "#d1495b", "#5c6b9c", "#e09f3e")  # ours first; told apart without red, too
MARKERS = ("o", "s", "^", "D")
BINS_PER_SECOND = 20  # of the gaps, of which the longest in each is drawn
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the reader's font
    "svg.hashsalt": "rootstock",  # the same figures make the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}


def draw(records: Iterable[Record], folder: Path) -> list[Path]:
    """The plots for which there are records; the files written."""
    kept = list(records)
    unique = [
        r for r in kept if isinstance(r.scenario, Load) and r.name == f"unique-{_users(r):.0f}"
    ]
    drawn = []
    with mpl.rc_context(STYLE):
        if len(unique) > 1:
            drawn.append(_save(throughput(unique), folder / "throughput.svg"))
        for record in kept:
            if isinstance(record.scenario, Shares):
                drawn.append(_save(first_token(record), folder / "first-token.svg"))
            if isinstance(record.scenario, Arrival):
                drawn.append(_save(gaps(record), folder / "gaps.svg"))
    return drawn


def throughput(records: Iterable[Record]) -> Figure:
    """Generated tokens per second over concurrency, of unique prompts; bars from least to most."""
    kept = sorted(records, key=_users)
    figure, axes = _axes("unique prompts at a time", "generated tokens/s")
    peers = kept[0].peers
    for place, peer in enumerate(peers):
        points = [
            (_users(record), [run.completion_tokens_per_second for run in runs])
            for record in kept
            for name, runs in runs_of(record, Summary)
            if name == peer
        ]
        if points:
            users, speeds = [users for users, _ in points], [found for _, found in points]
            middle = [statistics.median(found) for found in speeds]
            below = [mid - min(found) for mid, found in zip(middle, speeds, strict=True)]
            above = [max(found) - mid for mid, found in zip(middle, speeds, strict=True)]
            axes.errorbar(users, middle, yerr=(below, above), capsize=3, **_look(place, peer))
    axes.set_xscale("log", base=2)
    ticks = [_users(record) for record in kept]
    axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def first_token(record: Record) -> Figure:
    """Seconds to the first token over the share of the prompt that has been seen: medians."""
    figure, axes = _axes("share of the prompt seen before, %", "first token, s")
    for peer, runs in runs_of(record, Probed):
        shares = [100 * probe.share for probe in runs[0].probes]
        axes.plot(shares, share_seconds(runs), **_look(record.peers.index(peer), peer))
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def gaps(record: Record) -> Figure:
    """The streams' gaps in each server's median round: lines of their length, at their height."""
    figure, axes = _axes("seconds since the long prompt was sent", "gap between tokens, s")
    for peer, runs in runs_of(record, Arrived):
        run = sorted(runs, key=lambda found: found.worst_gap)[(len(runs) - 1) // 2]
        longest = {int(gap.ended * BINS_PER_SECOND): gap for gap in sorted(run.gaps, key=_lasted)}
        axes.hlines(
            y=[gap.lasted for gap in longest.values()],
            xmin=[gap.ended - gap.lasted for gap in longest.values()],
            xmax=[gap.ended for gap in longest.values()],
            colors=COLOURS[record.peers.index(peer) % len(COLOURS)],
            linewidth=2,
            label=peer,
        )
    axes.set_yscale("log")
    axes.legend()
    return figure


def _lasted(gap: Gap) -> float:
    return gap.lasted


def _users(record: Record) -> float:
    return record.scenario.concurrency if isinstance(record.scenario, Load) else 0


def _axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def _look(place: int, peer: str) -> dict[str, Any]:
    return {
        "label": peer,
        "color": COLOURS[place % len(COLOURS)],
        "marker": MARKERS[place % len(MARKERS)],
    }


def _save(figure: Figure, file: Path) -> Path:
    figure.savefig(file, metadata={"Date": None})
    return file

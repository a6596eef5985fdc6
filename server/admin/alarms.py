"""Alarms of a loaded model: failures and slow fallbacks, and their remedies."""

from collections.abc import Iterator
from typing import NamedTuple

from engine.values.model import ModelCard
from engine.values.stats import EngineStats


class Loss(NamedTuple):
    """A failure and its remedy. The parts of a sentence of `alarms`."""

    problem: str
    advice: str


_WRITE_ADVICE = {
    "no_space": "Free some of the disk, or lower disk_cache_bytes",
    "read_only": "Let the daemon write to the directory that disk_cache names",
    "resources": "Raise the limit of open files (ulimit -n)",
}
_OTHER_WRITE_ADVICE = "Check the disk; the log has the error"


def losses(stats: EngineStats) -> Iterator[Loss]:
    """Failures that need an operator: for some of them only another start helps."""
    if stats.contradictions:
        yield Loss(
            "the KV store contradicts itself: the log says how",
            "Start the daemon again, which empties it, and report those lines of the log",
        )
    disk = stats.cache.disk
    if disk is None:
        return
    if disk.ended_threads:
        names = ", ".join(disk.ended_threads)
        yield Loss(
            f"threads of the disk cache have ended: {names}",
            "Start the daemon again",
        )
    if disk.write_fault is not None:
        yield Loss(
            f"the disk cache cannot be written: {disk.write_fault}",
            _WRITE_ADVICE.get(disk.write_fault, _OTHER_WRITE_ADVICE),
        )


def alarms(stats: EngineStats, card: ModelCard | None) -> list[str]:
    """Sentences about a loaded model, the worst first, each with what to do."""
    found = [_sentence(loss.problem, loss.advice) for loss in losses(stats)]
    disk = stats.cache.disk
    if disk is not None and disk.is_day_spent:
        found.append(
            "Nothing is written to disk before tomorrow (UTC): the limit of a day is reached. "
            "Raise disk_cache_daily_bytes to write more."
        )
    found += card.slowdowns if card is not None else ()
    if stats.decode is not None and stats.decode.problem:
        problem = f"decodes are eager, so tokens take longer: {stats.decode.problem}"
        found.append(_sentence(problem, "Unload and load the model to try again"))
    if stats.decode is not None and stats.decode.attention_problem:
        problem = f"attention gathers, so tokens take longer: {stats.decode.attention_problem}"
        advice = "Report it; `rootstock doctor --measure --model NAME` compares attentions again"
        found.append(_sentence(problem, advice))
    return found


def _sentence(problem: str, advice: str) -> str:
    return f"{problem[0].upper()}{problem[1:]}. {advice}."

"""docs/architectures.md: what the run has found."""

import platform
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from tests.conformance.cases import CASES
from tests.conformance.outcome import Outcome, Verdict
from tests.golden.driving import NEAR_TIE

PATH = Path(__file__).parents[2] / "docs" / "architectures.md"

_TEXT = """\
# Architectures

<!-- Written by `make conformance`. -->

mlx-lm {mlx_lm} has {total} architectures: **{served} served, {refused} refused** at load.

The daemon's loader, scheduler, store and runner served a tiny random checkpoint of each in float32:
ragged prompts, cold and warm, next turns, shared prefixes, two choices of one prompt, preemption.
Every generated token was the best of mlx-lm's own logits (or within {near_tie:g} of the best), and
`cached_tokens` was exact. The largest error of a logit, relative to mlx-lm's, was {error:.0e}.

Made with mlx {mlx} and mlx-lm {mlx_lm} on the {device} of {system}. The kinds of layers and batches
are [explained here](internals/attention-and-decode.md#kinds-of-caches).

## Served

{served_table}
{notes}Decode steps are compiled, except for:

{eager}
Also served: {variants}.

## Images

Families whose checkpoints have a vision tower were served prompts with images: at every place of
the text, several at once, cold and warm. The reference is one forward of mlx-vlm's whole model,
with the masks of transformers for Gemma's images, and its GELU in Llama 4's tower.

{images_table}
## Refused

{refusals}"""
_IMAGES_HEADER = """\
| family | prompts | largest error of a log-probability |
| --- | --- | --- |
"""
_HEADER = """\
| layers keep | batches | architectures |
| --- | --- | --- |
"""
_SERVED_ROW = re.compile(r"^\| [^|]* \| [^|]* \| ([^|]+) \|$", re.MULTILINE)
_VARIANTS = re.compile(r"^Also served: (.*)\.$", re.MULTILINE)
_REFUSED_ROW = re.compile(r"^- `([^`]+)`: (?:refused|wrong)", re.MULTILINE)


def render(outcomes: Sequence[Outcome], images: Sequence[Outcome]) -> str:
    """The whole document, of a run of everything. `images`: of the families with towers."""
    plain = architectures(outcomes)
    verdicts = [outcome.verdict for outcome in plain]
    served = [outcome for outcome in plain if outcome.verdict is Verdict.SERVED]
    variants = [outcome for outcome in outcomes if outcome not in plain]
    refused = [outcome for outcome in outcomes if outcome.verdict is not Verdict.SERVED]
    return _TEXT.format(
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
        total=len(plain),
        served=verdicts.count(Verdict.SERVED),
        refused=verdicts.count(Verdict.REFUSED),
        near_tie=NEAR_TIE,
        error=max((outcome.error for outcome in outcomes), default=0.0),
        device="CPU" if mx.default_device() == mx.cpu else "GPU",
        system=f"{platform.system()} {platform.machine()}",
        served_table=_served(served),
        notes=_notes(served),
        eager=_eager(served),
        variants=_names(each for each in variants if each.verdict is Verdict.SERVED),
        images_table=images_table(images),
        refusals="".join(map(_refusal, refused)),
    )


def images_table(outcomes: Sequence[Outcome]) -> str:
    """A row for each family that is served with images, and why those of others are refused."""
    served = [each for each in outcomes if each.verdict is Verdict.SERVED]
    rows = [f"| `{each.name}` | image | {each.error:.0e} |\n" for each in served]
    refused = [
        f"- `{each.name}` is served without images: {each.reason}\n"
        for each in outcomes
        if each.verdict is Verdict.REFUSED
    ]
    return "".join([_IMAGES_HEADER, *rows, *(["\n"] if refused else []), *refused])


def architectures(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that stand for an architecture, one for each."""
    return [outcome for outcome in outcomes if not CASES[outcome.name].is_variant]


def served_column(document: str) -> dict[str, bool]:
    """Whether each checkpoint is served, by its name in the document."""
    lists = (*_SERVED_ROW.findall(document), *_VARIANTS.findall(document))
    served = [name for names in lists for name in re.findall(r"`([^`]+)`", names)]
    return dict.fromkeys(served, True) | dict.fromkeys(_REFUSED_ROW.findall(document), False)


def _served(outcomes: Iterable[Outcome]) -> str:
    """A row for each combination of kept layers and batches; windows of any size are one kind."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        keeps = re.sub(r"(window|chunks|groups)(?: of)? \d+", r"\1", outcome.keeps)
        groups.setdefault((keeps, outcome.batching), []).append(outcome)
    rows = sorted(groups.items(), key=lambda group: -len(group[1]))
    return _HEADER + "".join(f"| {a} | {b} | {_names(found)} |\n" for (a, b), found in rows)


def _eager(outcomes: Iterable[Outcome]) -> str:
    """The served architectures without compiled decodes, by reason. Some do not decode."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.compiled not in ("yes", ""):
            groups.setdefault(_clause(outcome.compiled), []).append(outcome)
    return "".join(f"- {_names(found)}: {reason}\n" for reason, found in groups.items())


_NOTES = {
    "deepseek_v41": "without engram layers, which mlx-lm {mlx_lm} does not load. Published "
    "checkpoints have them, and are refused"
}
"""What an architecture is served without."""


def _notes(outcomes: Iterable[Outcome]) -> str:
    """A paragraph of the notes on those that are served; "" without any."""
    found = [
        f"- `{outcome.name}` is served {_NOTES[outcome.name].format(mlx_lm=version('mlx-lm'))}.\n"
        for outcome in outcomes
        if outcome.name in _NOTES
    ]
    return "".join([*found, "\n"]) if found else ""


def _names(outcomes: Iterable[Outcome]) -> str:
    return ", ".join(f"`{outcome.name}`" for outcome in outcomes)


def _refusal(outcome: Outcome) -> str:
    return f"- `{outcome.name}`: {outcome.verdict}, {_clause(outcome.reason)}\n"


def _clause(reason: str) -> str:
    """The beginning of a reason: what failed, and the first words of the cause."""
    first = re.split(r"; | \(", reason)[0]
    return ": ".join(first.split(": ")[:2])

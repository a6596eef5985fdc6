"""Untrusted text (of a model, a server, a file name) made safe for a terminal; sizes and shares."""

from collections.abc import Sequence

from server.schemas.cache import RecentHits

# C0, DEL and C1, but for newline and tab: https://www.unicode.org/charts/PDF/U0080.pdf
CONTROL_CHARACTERS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - set(map(ord, "\n\t")))
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
SHOWN_BYTES = 2**20  # of other models: less is what the folder takes itself


def printable(text: str) -> str:
    """The text without control characters other than newline and tab."""
    return text.translate(CONTROL_CHARACTERS)


def bytes_text(n_bytes: int) -> str:
    """A size in the largest unit that it fills, such as `1.50 GiB`."""
    for unit, size in UNITS.items():
        if n_bytes >= size:
            return f"{n_bytes / size:.2f} {unit}"
    return f"{n_bytes} bytes"


def fullness_text(used_bytes: int, shared_bytes: int, limit_bytes: int) -> str:
    """Of a disk cache: what a model takes, beside what others take of the limit for all."""
    others = shared_bytes - used_bytes
    beside = f", other models {bytes_text(others)}" if others >= SHOWN_BYTES else ""
    return f"{bytes_text(used_bytes)} of {bytes_text(limit_bytes)}{beside}"


def recent_text(recent: Sequence[RecentHits]) -> str:
    """Such as `75.0% in 5 min, 60.1% in 15 min`, of the windows in which anything was asked."""
    return ", ".join(
        f"{hits.hit_tokens / hits.queried_tokens:.1%} in {hits.seconds // 60} min"
        for hits in recent
        if hits.queried_tokens
    )

"""A daemon's picture as rich tables. All its text is untrusted, and never read as markup."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from engine.values.tree import TreeArena
from server.schemas.cache_tree import CacheTree, TreeDisk, TreeRequest
from server.terminal.tables import cut, facts, listing
from server.terminal.text import bytes_text, fullness_text, recent_text
from server.terminal.top.prefixes import heaviest
from server.terminal.top.watch import Rates, Seen

STATES = (("held", "█", "green"), ("cached", "▒", "cyan"), ("free", "░", "bright_black"))

PREFIX_HEADS = ("prefix, by position", "tokens", "with all below", "holders", "idle", "evicted")
WIDE = "with all below"  # the column that narrow terminals do without
REQUEST_HEADS = ("request", "state", "prompt", "cached", "computed", "output")
FACTS = ("requests", "tokens/s", "hits", "lately", "daemon", "first token", "sharing", "disk")
"""The most important first: low terminals have the first of them."""

ROOMY_LINES = 24
WIDE_COLUMNS = 80
ARENA_LINES = 2  # the bar and its legend
PREFIX_LINES = 3  # beside its rows: the heads, what is folded, what is left
REQUEST_LINES = 2  # likewise, without what is folded
LEAST_ROWS = 2  # of both tables together
MOST_GUIDE = 24  # cells that the lines of the tree may take


@dataclass(frozen=True, slots=True)
class Size:
    """A terminal's."""

    columns: int
    lines: int


class ArenaBar:
    """One line of the terminal's width, of held, cached and free."""

    def __init__(self, arena: TreeArena) -> None:
        self._arena = arena

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        width = options.max_width / max(self._arena.blocks, 1)
        blocks = (getattr(self._arena, state) for state, _, _ in STATES)
        ends = [round(end * width) for end in accumulate(blocks, initial=0)]
        for (_, mark, color), (start, end) in zip(STATES, pairwise(ends), strict=True):
            yield Segment(mark * (end - start), Style(color=color))
        yield Segment.line()


def drawn(seen: Seen, url: str, size: Size) -> RenderableType:
    """What matters most, in no more lines than there are. A low terminal has no blank ones."""
    picture = seen.picture
    known = [fact for fact in _facts(seen, url) if fact[1]]
    names = [name for name in FACTS if name in dict(known)]
    gap = [Text()] if size.lines >= ROOMY_LINES else []
    n_facts = len(known) if gap else size.lines // 5
    told = [fact for fact in known if fact[0] in names[:n_facts]]
    fixed = len(told) + ARENA_LINES + len(gap) + PREFIX_LINES
    if picture.requests:
        fixed += REQUEST_LINES + len(gap)
    n_rows = max(LEAST_ROWS, size.lines - fixed)
    n_requests = min(len(picture.requests), n_rows // 2)
    return Group(
        facts(told, cut),
        ArenaBar(picture.arena),
        _legend(picture.arena),
        *gap,
        *_prefixes(seen, n_rows - n_requests, size.columns),
        *(gap if picture.requests else ()),
        *_requests(picture, n_requests),
    )


def _facts(seen: Seen, url: str) -> list[tuple[str, str]]:
    picture, counts = seen.picture, seen.picture.counters
    hit_share = counts.cached_tokens / max(counts.prompt_tokens, 1)
    first_seconds = counts.first_token_seconds / max(counts.first_tokens, 1)
    running = sum(request.state == "running" for request in picture.requests)
    waiting = len(picture.requests) - running + picture.hidden_requests.waiting
    running += picture.hidden_requests.running
    return [
        ("daemon", f"{picture.model} at {url}"),
        ("requests", f"{running:,} running, {waiting:,} waiting"),
        ("tokens/s", _rates_text(seen.rates) if seen.rates else ""),
        ("hits", f"{hit_share:.1%} of {counts.prompt_tokens:,} prompt tokens since start"),
        ("lately", recent_text(picture.recent_hits)),
        ("first token", f"after {first_seconds:.2f} s on average" if counts.first_tokens else ""),
        ("sharing", f"saves {bytes_text(picture.arena.saved_bytes)} of copies right now"),
        ("disk", _disk_text(picture.disk) if picture.disk else ""),
    ]


def _disk_text(disk: TreeDisk) -> str:
    full = fullness_text(disk.used_bytes, disk.shared_bytes, disk.limit_bytes)
    return f"{full}; {disk.loaded_tokens:,} tokens loaded for {disk.hits:,} prompts since start"


def _rates_text(rates: Rates) -> str:
    return (
        f"{rates.generated:,.1f} generated; {rates.computed:,.0f} computed, "
        f"{rates.cached:,.0f} found"
    )


def _legend(arena: TreeArena) -> Text:
    legend = cut("")
    for state, mark, color in STATES:
        legend.append(mark, color).append(f" {state} {getattr(arena, state):,}   ")
    size = bytes_text(arena.blocks * arena.block_bytes)
    return legend.append(f"of {arena.blocks:,} blocks, {size}")


def _prefixes(seen: Seen, n_rows: int, n_columns: int) -> Iterator[RenderableType]:
    found = heaviest(seen.picture, n_rows)
    if not seen.picture.nodes:
        yield Text("The cache is empty.", "dim")
        return
    names = {namespace.id: namespace.name for namespace in seen.picture.namespaces}
    rows = []
    for prefix in found.rows:
        node = prefix.node
        idle = node.idle_seconds + (0 if node.holders else seen.age_seconds)
        rows.append(
            (
                prefix.guide[-MOST_GUIDE:]
                + f"{node.start:,} to {node.start + node.tokens:,}"
                + (f"  {names.get(node.namespace, '')}" if node.parent is None else ""),
                f"{node.tokens:,}",
                f"{prefix.weight:,}",
                f"{node.holders:,}" if node.holders else "-",
                "-" if node.holders else _age(idle),
                "" if node.next_evicted is None else f"next {node.next_evicted}",
            )
        )
    yield _table(PREFIX_HEADS, rows, n_columns)
    if found.folded_prompts:
        prompts, tokens = found.folded_prompts, found.folded_tokens
        yield Text(f"+{prompts:,} that share nothing: {tokens:,} tokens", "dim")
    if found.left_nodes:
        yield Text(f"and {found.left_nodes:,} more nodes of {found.left_tokens:,} tokens", "dim")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], n_columns: int) -> Table:
    shown = [place for place, head in enumerate(heads) if head != WIDE or n_columns >= WIDE_COLUMNS]
    return listing(
        [heads[place] for place in shown],
        [[row[place] for place in shown] for row in rows],
        cut,
    )


def _requests(picture: CacheTree, n_rows: int) -> Iterator[RenderableType]:
    if not picture.requests:
        return
    waits_last = sorted(picture.requests, key=lambda request: request.state != "running")
    yield listing(REQUEST_HEADS, [_request_row(request) for request in waits_last[:n_rows]], cut)
    hidden = picture.hidden_requests
    left = len(picture.requests) - n_rows + hidden.running + hidden.waiting
    if left:
        yield Text(f"and {left:,} more requests", "dim")


def _request_row(request: TreeRequest) -> tuple[str, ...]:
    return (
        request.id,
        request.state,
        f"{request.prompt_tokens:,}",
        f"{request.cached_tokens:,}",
        f"{request.computed_tokens:,}",
        f"{request.output_tokens:,}",
    )


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"

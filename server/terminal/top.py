"""`rootstock top`: a model's cache and requests, drawn until the user leaves."""

import heapq
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from engine.values.tree import TreeArena, TreeCounters
from server.admin_schema import CacheTree, TreeDisk, TreeNode, TreeRequest
from server.terminal.admin_client import Admin, loaded_model, recent_text
from server.terminal.cli import command
from server.terminal.console import (
    TERMINAL_ENDS,
    NotLoaded,
    TerminalError,
    age_text,
    bytes_text,
    cut,
    exiting_on,
    facts,
    fullness_text,
    id_text,
    listing,
    replace_bad_text,
    state_text,
)
from server.terminal.endpoint import ApiKey, DaemonUrl, LoadedModelName, daemon_at

REDRAWS_PER_SECOND = 4
LINES_WITHOUT_TERMINAL = 60
MEMORY_SECONDS = 1.0  # between two looks at the machine's memory
WINDOW_SECONDS = 5.0
LEAST_SECONDS = 1.0  # a rate over less is mostly chance

STATES = (("held", "█", "green"), ("cached", "▒", "cyan"), ("free", "░", "bright_black"))

PREFIX_HEADS = ("prefix, by position", "tokens", "with all below", "holders", "idle", "evicted")
WIDE = "with all below"  # the column that narrow terminals do without
REQUEST_HEADS = ("request", "state", "prompt", "cached", "computed", "output")
FACTS = (
    "memory",
    "requests",
    "tokens/s",
    "hits",
    "lately",
    "daemon",
    "first token",
    "sharing",
    "disk",
)
"""The most important first: a low terminal shows only the first ones."""

ROOMY_LINES = 24
WIDE_COLUMNS = 80
ARENA_LINES = 2  # the bar and its legend
PREFIX_LINES = 3  # in addition to the rows: the heads, the folded prompts, the nodes left out
REQUEST_LINES = 2  # in addition to the rows: the heads, the requests left out
LEAST_ROWS = 2  # of both tables together
MOST_GUIDE = 24  # cells that the lines of the tree may take
MOST_ALONE = 5
"""The most prompts that share nothing and still have rows of their own; the others are folded."""


@command
def top(model: LoadedModelName = None, url: DaemonUrl = None, api_key: ApiKey = "") -> None:
    """Watch a model's cache and requests: each prefix is shown once, with its users.

    Ctrl-C leaves. Without a terminal it is shown once.
    """
    with daemon_at(url, api_key, model) as (daemon, endpoint):
        name = loaded_model(daemon, model)
        replace_bad_text()
        if sys.stdout.isatty():
            with exiting_on(TERMINAL_ENDS):
                _follow(daemon, endpoint.base_url, name)
        else:
            console = Console()
            frame = Frame(daemon.picture(name), 0.0, None, _memory_problem(daemon))
            size = Size(console.width, LINES_WITHOUT_TERMINAL)
            console.print(drawn(frame, endpoint.base_url, size))


def _follow(daemon: Admin, url: str, model: str) -> None:
    """Draw until Ctrl-C. Raises TerminalError when the model is unloaded or the daemon ends."""
    console = Console()
    try:
        with closing(daemon.pictures(model)) as pictures:
            watch = Watch(next(pictures))

            def now_drawn() -> RenderableType:
                return drawn(watch.frame(), url, Size(*console.size))

            with (
                _polling(daemon, watch),
                Live(
                    console=console,
                    screen=True,
                    get_renderable=now_drawn,
                    refresh_per_second=REDRAWS_PER_SECOND,
                    vertical_overflow="crop",
                ),
            ):
                for picture in pictures:
                    watch.take(picture)
    except KeyboardInterrupt:
        return
    except StopIteration:
        pass
    try:
        loaded_model(daemon, model)
    except NotLoaded:
        raise
    except TerminalError:
        pass  # a daemon that has stopped does not answer
    raise TerminalError("the daemon has stopped")


def _memory_problem(daemon: Admin) -> str:
    """What the daemon does for lack of memory, and why; empty while memory is not short."""
    guard = daemon.models().memory_guard
    return "" if guard is None else guard.problem or ""


@contextmanager
def _polling(daemon: Admin, watch: "Watch") -> Iterator[None]:
    """Note each MEMORY_SECONDS whether memory is short, on a thread of its own, until the block
    ends: pictures come only while the cache changes.
    """
    has_ended = threading.Event()

    def poll() -> None:
        with suppress(TerminalError):  # the daemon has stopped, which the pictures notice
            while not has_ended.is_set():
                watch.memory = _memory_problem(daemon)
                has_ended.wait(MEMORY_SECONDS)

    thread = threading.Thread(target=poll, name="memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second over the last WINDOW_SECONDS."""

    computed: float  # tokens of prompts
    cached: float  # tokens of prompts
    generated: float


@dataclass(frozen=True, slots=True)
class Frame:
    """A picture of the cache as it is drawn. `rates` is None where there is only one picture."""

    picture: CacheTree
    age_seconds: float  # of the picture
    rates: Rates | None
    memory: str = ""  # what is done for lack of memory


_Count = tuple[float, TreeCounters]
"""The clock's time in seconds, and the daemon's counters at that time."""


class Watch:
    """The last picture of a daemon's cache, and its rates over the last WINDOW_SECONDS.

    One thread writes it and another reads it: its state is replaced as a whole. The daemon sends no
    picture while nothing changes, so the rates then fall with time.
    """

    def __init__(self, first: CacheTree, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.memory = ""
        """What is done for lack of memory; empty while it is not short."""
        self._known: tuple[CacheTree, tuple[_Count, ...]] = (first, ((clock(), first.counters),))

    def take(self, picture: CacheTree) -> None:
        """Note the next picture."""
        now = self._clock()
        _, counts = self._known
        self._known = (picture, (*_since(now - WINDOW_SECONDS, counts), (now, picture.counters)))

    def frame(self) -> Frame:
        """The last picture, its age, and the rates up to now."""
        now = self._clock()
        picture, counts = self._known
        (since, first), *_ = _since(now - WINDOW_SECONDS, counts)
        seconds = min(max(now - since, LEAST_SECONDS), WINDOW_SECONDS)
        rates = _rates(first, picture.counters, seconds)
        return Frame(picture, now - counts[-1][0], rates, self.memory)


def _since(seconds: float, counts: tuple[_Count, ...]) -> tuple[_Count, ...]:
    """The counts since that time, and the last one before it."""
    n_older = sum(at <= seconds for at, _ in counts)
    return counts[max(0, n_older - 1) :]


def _rates(first: TreeCounters, last: TreeCounters, seconds: float) -> Rates:
    """The rates between two counts, at least 0: a restarted daemon counts from 0 again."""
    prompt = max(0, last.prompt_tokens - first.prompt_tokens)
    cached = min(prompt, max(0, last.cached_tokens - first.cached_tokens))
    generated = max(0, last.generated_tokens - first.generated_tokens)
    return Rates((prompt - cached) / seconds, cached / seconds, generated / seconds)


@dataclass(frozen=True, slots=True)
class Size:
    """A terminal's size in cells."""

    columns: int
    lines: int


class ArenaBar:
    """A line of the terminal's width, divided like the arena's blocks: held, cached and free."""

    def __init__(self, arena: TreeArena) -> None:
        self._arena = arena

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        width = options.max_width / max(self._arena.blocks, 1)
        blocks = (getattr(self._arena, state) for state, _, _ in STATES)
        ends = [round(end * width) for end in accumulate(blocks, initial=0)]
        for (_, mark, color), (start, end) in zip(STATES, pairwise(ends), strict=True):
            yield Segment(mark * (end - start), Style(color=color))
        yield Segment.line()


def drawn(frame: Frame, url: str, size: Size) -> RenderableType:
    """The most important facts, prefixes and requests, in at most `size.lines` lines. A low
    terminal has no blank lines.
    """
    picture = frame.picture
    known = [fact for fact in _facts(frame, url) if fact[1]]
    names = [name for name in FACTS if name in dict(known)]
    gap = [Text()] if size.lines >= ROOMY_LINES else []
    n_facts = len(known) if gap else size.lines // 5
    shown = [fact for fact in known if fact[0] in names[:n_facts]]
    fixed = len(shown) + ARENA_LINES + len(gap) + PREFIX_LINES
    if picture.requests:
        fixed += REQUEST_LINES + len(gap)
    n_rows = max(LEAST_ROWS, size.lines - fixed)
    n_requests = min(len(picture.requests), n_rows // 2)
    return Group(
        facts(shown, cut),
        ArenaBar(picture.arena),
        _legend(picture.arena),
        *gap,
        *_prefixes(frame, n_rows - n_requests, size.columns),
        *(gap if picture.requests else ()),
        *_requests(picture, n_requests),
    )


def _facts(frame: Frame, url: str) -> list[tuple[str, str]]:
    picture, counts = frame.picture, frame.picture.counters
    hit_share = counts.cached_tokens / max(counts.prompt_tokens, 1)
    first_seconds = counts.first_token_seconds / max(counts.first_tokens, 1)
    running = sum(request.state == "running" for request in picture.requests)
    waiting = len(picture.requests) - running + picture.hidden_requests.waiting
    running += picture.hidden_requests.running
    return [
        ("daemon", f"{picture.model} at {url}"),
        ("memory", frame.memory and f"is short: {frame.memory}"),
        ("requests", f"{running:,} running, {waiting:,} waiting"),
        ("tokens/s", _rates_text(frame.rates) if frame.rates else ""),
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


def _prefixes(frame: Frame, n_rows: int, n_columns: int) -> Iterator[RenderableType]:
    found = heaviest(frame.picture, n_rows)
    if not frame.picture.nodes:
        yield Text("The cache is empty.", "dim")
        return
    names = {namespace.id: namespace.name for namespace in frame.picture.namespaces}
    rows = []
    for prefix in found.rows:
        node = prefix.node
        idle = node.idle_seconds + (0 if node.holders else frame.age_seconds)
        rows.append(
            (
                prefix.guide[-MOST_GUIDE:]
                + f"{node.start:,} to {node.start + node.tokens:,}"
                + (f"  {names.get(node.namespace, '')}" if node.parent is None else ""),
                f"{node.tokens:,}",
                f"{prefix.weight:,}",
                f"{node.holders:,}" if node.holders else "-",
                "-" if node.holders else age_text(idle),
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
    waiting_last = sorted(picture.requests, key=lambda request: request.state != "running")
    yield listing(REQUEST_HEADS, [_request_row(request) for request in waiting_last[:n_rows]], cut)
    hidden = picture.hidden_requests
    left = len(picture.requests) - n_rows + hidden.running + hidden.waiting
    if left:
        yield Text(f"and {left:,} more requests", "dim")


def _request_row(request: TreeRequest) -> tuple[str, ...]:
    return (
        id_text(request.id),
        state_text(request.state, request.waits_for),
        f"{request.prompt_tokens:,}",
        f"{request.cached_tokens:,}",
        f"{request.computed_tokens:,}",
        f"{request.output_tokens:,}",
    )


@dataclass(frozen=True, slots=True)
class Prefix:
    """A row of the tree. `guide` draws the branches before it; `weight` counts the tokens of the
    node and of all its descendants.
    """

    guide: str
    node: TreeNode
    weight: int


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The rows; the prompts that share nothing and are folded; and the nodes that are left out."""

    rows: Sequence[Prefix]
    folded_prompts: int
    folded_tokens: int
    left_nodes: int
    left_tokens: int


def heaviest(picture: CacheTree, n_rows: int, most_alone: int = MOST_ALONE) -> Prefixes:
    """At most `n_rows` nodes, chosen one by one: the heaviest node whose parent is chosen already,
    and before all others one that a running request holds. Siblings come in the same order.

    Prompts that share nothing are chosen last, and at most `most_alone` of them.
    """
    children: defaultdict[int | None, list[TreeNode]] = defaultdict(list)
    for node in picture.nodes:
        children[node.parent].append(node)
    weights = _weights(picture.nodes)
    alone = _alone(picture, children)
    kept = set(heapq.nlargest(most_alone, alone, key=lambda root: (weights[root], -root)))
    chosen = _chosen(children, weights, n_rows, alone.keys(), alone.keys() - kept)
    drawn = {
        parent: sorted(
            (n for n in nodes if n.id in chosen), key=lambda n: (not n.holders, -weights[n.id])
        )
        for parent, nodes in children.items()
    }
    rows = list(_rows(drawn, weights))
    everything = sum(weights[root.id] for root in children[None]) + picture.hidden.tokens
    hidden = picture.hidden.nodes + sum(n.hidden.nodes for n in picture.nodes if n.hidden)
    folded = alone.keys() - chosen
    folded_tokens = sum(weights[root] for root in folded)
    left = len(picture.nodes) - len(rows) + hidden - sum(alone[root] for root in folded)
    left_tokens = everything - sum(row.node.tokens for row in rows) - folded_tokens
    return Prefixes(rows, len(folded), folded_tokens, left, left_tokens)


def _weights(nodes: Sequence[TreeNode]) -> Mapping[int, int]:
    """Tokens of each node and all its descendants, by the node's id."""
    weights = {n.id: n.tokens + (n.hidden.tokens if n.hidden else 0) for n in nodes}
    for node in reversed(nodes):  # children before their parents
        if node.parent is not None:
            weights[node.parent] += weights[node.id]
    return weights


def _alone(picture: CacheTree, children: Mapping[int | None, list[TreeNode]]) -> Mapping[int, int]:
    """The roots of prompts that share nothing: no live request uses them and nothing branches off
    them. The values are how many nodes each has.
    """
    used = {request.node for request in picture.requests}

    def n_nodes(root: TreeNode) -> int:
        path = [root]
        while path[-1].id not in used and not path[-1].holders and not path[-1].hidden:
            match children.get(path[-1].id, []):
                case []:
                    return len(path)
                case [only]:
                    path.append(only)
                case _:
                    return 0
        return 0

    return {root.id: n for root in children[None] if (n := n_nodes(root))}


def _chosen(
    children: Mapping[int | None, list[TreeNode]],
    weights: Mapping[int, int],
    n_rows: int,
    last: Set[int],
    never: Set[int],
) -> Set[int]:
    """The ids of at most `n_rows` nodes, always with their parents. Nodes below the roots `last`
    are chosen after all others, those below the roots `never` not at all.
    """
    chosen: set[int] = set()
    open_nodes = [
        (node.id in last, not node.holders, -weights[node.id], node.id)
        for node in children[None]
        if node.id not in never
    ]
    heapq.heapify(open_nodes)
    while open_nodes and len(chosen) < n_rows:
        is_last, *_, node_id = heapq.heappop(open_nodes)
        chosen.add(node_id)
        for child in children.get(node_id, ()):
            heapq.heappush(open_nodes, (is_last, not child.holders, -weights[child.id], child.id))
    return chosen


def _rows(
    drawn: Mapping[int | None, list[TreeNode]], weights: Mapping[int, int]
) -> Iterator[Prefix]:
    """The rows, depth first; without recursion, because a tree may be deep."""
    open_nodes = [("", "", root) for root in reversed(drawn.get(None, []))]
    while open_nodes:
        indent, branch, node = open_nodes.pop()
        yield Prefix(indent + branch, node, weights[node.id])
        inner = indent + {"": "", "├ ": "│ ", "└ ": "  "}[branch]
        below = drawn.get(node.id, [])
        branches = ["├ "] * (len(below) - 1) + ["└ "] if below else []
        open_nodes += [
            (inner, ahead, child)
            for ahead, child in reversed(list(zip(branches, below, strict=True)))
        ]

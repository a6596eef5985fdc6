"""`python -m load_tests agents`: a recorded agent's session through each dialect."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from engine.mlx_backend.cpu.blas import load_blas
from load_tests.agents.dialects.chat import ChatCompletions
from load_tests.agents.dialects.dialect import Dialect
from load_tests.agents.dialects.messages import Messages
from load_tests.agents.dialects.responses import Responses
from load_tests.agents.player import Player, Session
from load_tests.agents.recording import TURNS, record
from load_tests.agents.styles import STYLES, Style
from load_tests.agents.tables import Run, summary_table, turn_table
from load_tests.agents.tokens import PromptTokens
from load_tests.checkpoint import checkpoint
from load_tests.client import Target, TargetError
from load_tests.conditions import observe
from load_tests.peers.catalogue import rootstock
from load_tests.processes import cpu_seconds, free_port, running
from load_tests.terminal import fail, show

DIALECTS: Mapping[str, Dialect] = {
    "chat": ChatCompletions(),
    "responses": Responses(),
    "messages": Messages(),
}
SESSIONS = 2
WARM_UP_TURNS = 2
LOG = Path("build/load_tests/agents.log")
LEAST_SHARE = 0.98


def agents(
    *,
    dialect: Annotated[
        list[str] | None, typer.Option(help="chat, responses or messages; may be repeated.")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Of each session.")] = TURNS,
    repeat: Annotated[int, typer.Option(min=1, help="Replays in each style.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Replay two sessions of an agent through every dialect, a turn of each in turn.

    Fails if less than 98% of what a prompt has in common with earlier ones was adopted.
    """
    model = checkpoint("agent")
    peer = rootstock("--kv-cache-bytes", "1GiB")
    conditions = observe(seed, (" ".join(peer.arguments),), load_blas().brief or "the system's")
    chosen = [DIALECTS[name] for name in dialect or DIALECTS]
    try:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with running(peer.command(model, port), f"{url}/health", LOG) as daemon:
            target = Target(f"{url}/v1", peer.model_name)
            player = Player(target, PromptTokens(model), partial(cpu_seconds, daemon))
            runs = list(_runs(player, chosen, repeat, seed, turns))
    except TargetError as error:
        raise typer.Exit(fail(str(error))) from error
    tables = [turn_table(style, runs) for style in STYLES]
    show(conditions, markdown, *tables, summary_table(runs))
    short = [e for run in runs for e in run.exchanges if e.share < LEAST_SHARE]
    raise typer.Exit(fail(f"{len(short)} turns were below 98%") if short else 0)


def _runs(
    player: Player, dialects: Sequence[Dialect], repeat: int, seed: int, turns: int
) -> Iterator[Run]:
    """Of each style. The first sessions are short and not counted."""
    numbers = count()

    def play(style: Style, turns: int) -> Run:
        sessions = [
            Session(dialect, seat, number := next(numbers), record(seed, number, turns))
            for seat in range(SESSIONS)
            for dialect in dialects
        ]
        return Run(style, tuple(asyncio.run(player.play(sessions, style))))

    for style in STYLES:
        play(style, WARM_UP_TURNS)
        for _ in range(repeat):
            yield play(style, turns)

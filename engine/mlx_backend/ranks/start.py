"""The start of a model's ranks: what each loads, what all have in common, and MLX's group."""

import logging
import platform
import socket
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import msgspec
from pydantic import TypeAdapter

from engine.api import ModelError, Report, one_line
from engine.mlx_backend.loading.checkpoint import fingerprint
from engine.mlx_backend.loading.division import refuse
from engine.mlx_backend.ranks.group import Ranks
from engine.mlx_backend.ranks.link import Link, RankLost
from engine.mlx_backend.ranks.plan import Frame
from engine.process.child import start_child
from engine.process.handshake import read_key
from engine.process.joining import RANK_MODULE, Address, await_ranks
from engine.values.settings import EngineConfig

PROTOCOL = 1
"""Changes with the frames, with what ranks agree on, and with the order of their collectives."""

_CONFIG = TypeAdapter(EngineConfig)

logger = logging.getLogger(__name__)


class Setup(NamedTuple):
    """What rank 0 sends first: the rank of the receiver, and what it loads."""

    rank: int
    size: int
    n_sharing: int  # ranks on the receiver's machine, where rank 0 has started them
    config: bytes  # JSON
    checkpoint: str  # on rank 0's machine


class Facts(NamedTuple):
    """What all ranks must have in common."""

    protocol: int
    rootstock: str
    mlx: str
    mlx_lm: str
    device: str
    weights: str  # their digest, and that of config.json


class Joining(NamedTuple):
    """A rank's answer to its setup."""

    facts: Facts
    port: int  # on which it will listen for collectives


class JoinedRank(NamedTuple):
    """What a rank other than rank 0 loads, and with whom it computes."""

    ranks: Ranks
    config: EngineConfig
    checkpoint: Path


def start_ranks(config: EngineConfig, checkpoint: Path, report: Report) -> Ranks:
    """Start the other ranks of a model on this machine, or wait until they have joined from other
    machines, and connect all. Raises ModelError.
    """
    refuse(config)
    ranks = Ranks(0, config.ranks, config.local_ranks, report)
    try:
        for rank, connection in enumerate(_connections(config, ranks, report), 1):
            ranks.links.append(Link(connection, f"rank {rank}", ranks.lose))
        set_up(ranks, config, checkpoint)
    except BaseException as error:
        for link in ranks.links:
            with suppress(RankLost):
                link.send(Frame.FAILED, one_line(error).encode())
        ranks.close()
        raise
    return ranks


def _connections(config: EngineConfig, ranks: Ranks, report: Report) -> Iterator[socket.socket]:
    """The connections to all other ranks, in order. Raises ModelError."""
    if config.ranks_key_file is not None and (address := config.ranks_address) is not None:
        try:
            key = read_key(config.ranks_key_file)
        except ValueError as error:
            raise ModelError(f"ranks_key_file: {error}") from error
        yield from await_ranks(Address(*address), key, config.ranks, report)
        report("all ranks have joined; loading the model…")
        return
    report(f"starting {config.ranks - 1} more ranks on this machine…")
    for _ in range(1, config.ranks):
        connection, process = start_child(RANK_MODULE)
        ranks.children.append(process)
        yield connection


def set_up(ranks: Ranks, config: EngineConfig, checkpoint: Path) -> None:
    """Have the ranks that rank 0 has links to load their parts of a model, and connect all. Raises
    ModelError.
    """
    settings = _CONFIG.dump_json(config)
    for rank, link in enumerate(ranks.links, 1):
        setup = Setup(rank, ranks.size, ranks.n_sharing, settings, str(checkpoint))
        link.send(Frame.SETUP, msgspec.msgpack.encode(setup))
    own, addresses = facts_of(checkpoint), list[str]()
    for link in ranks.links:
        answer = link.receive_body(Frame.FACTS)
        joining = msgspec.msgpack.decode(answer, type=Joining)
        compare_facts(own, joining.facts, link.name)
        addresses.append(f"{link.hosts()[1]}:{joining.port}")
    own_address = f"{ranks.links[0].hosts()[0]}:{_free_port()}"
    addresses.insert(0, own_address)
    ranks.send(Frame.FORM, msgspec.msgpack.encode(addresses))
    ranks.form(addresses)


def join_ranks(link: Link, checkpoint: Path | None = None) -> JoinedRank:
    """Connect this rank with all others, as rank 0 sets it up. `checkpoint`: where the model is on
    this machine; None: where it is on rank 0's. Raises ModelError.
    """
    setup = msgspec.msgpack.decode(link.receive_body(Frame.SETUP), type=Setup)
    path = Path(setup.checkpoint) if checkpoint is None else checkpoint
    link.send(Frame.FACTS, msgspec.msgpack.encode(Joining(facts_of(path), _free_port())))
    ranks = Ranks(setup.rank, setup.size, setup.n_sharing, logger.error)
    ranks.links.append(link)
    ranks.form(msgspec.msgpack.decode(link.receive_body(Frame.FORM), type=list[str]))
    return JoinedRank(ranks, _CONFIG.validate_json(setup.config), path)


def facts_of(checkpoint: Path) -> Facts:
    """The facts of this process, and of a model on this machine. Raises ModelError."""
    kind = "cpu" if mx.default_device() == mx.cpu else "gpu"
    return Facts(
        PROTOCOL,
        rootstock=metadata.version("rootstock-serve"),
        mlx=metadata.version("mlx"),
        mlx_lm=metadata.version("mlx-lm"),
        device=f"{kind} {platform.machine()}",
        weights=fingerprint(checkpoint, lambda file: ""),  # a copy has another time
    )


def compare_facts(own: Facts, its: Facts, name: str) -> None:
    """Raise ModelError where a rank has other facts than rank 0."""
    for field, mine, other in zip(Facts._fields, own, its, strict=True):
        if mine != other:
            what = field.replace("_", "-")
            raise ModelError(f"{name} cannot join: its {what} is {other}, and rank 0's is {mine}")


def _free_port() -> int:
    """A port of this machine that was free just now."""
    with socket.create_server(("", 0)) as free:
        port: int = free.getsockname()[1]
    return port

"""Pictures of the cache between any two turns, compared with the tree."""

from dataclasses import replace
from random import Random

from engine.values.picture import CachePicture, Hidden
from engine.watch.picture import Renderer
from engine.watch.snapshot import SHOWN_NODES, SnapshotTaker
from tests.simulation.daemon import Daemon


class PictureCheck:
    """Watches an engine. A picture may have room for a few nodes only."""

    def __init__(self, daemon: Daemon, random: Random) -> None:
        self._daemon = daemon
        self._taker = SnapshotTaker(
            daemon.scheduler, daemon.sizes, random.choice([1, 3, SHOWN_NODES])
        )
        self._renderer = Renderer(daemon.store.block_size, daemon.scheduler.disk)
        self._picture: CachePicture | None = None

    def check(self) -> None:
        has_changed = self._renderer.apply(self._taker.take())
        before, self._picture = self._picture, self._renderer.render(1)
        if before is not None and not has_changed:
            assert _timeless(before) == _timeless(self._picture), "another picture, not announced"
        self._compare(self._picture)

    def _compare(self, picture: CachePicture) -> None:
        """Each node is drawn as it is, and what is left out is summed up."""
        tree = self._daemon.store.tree
        nodes = {} if tree is None else {node.serial: node for node in tree.nodes()}
        for drawn in picture.nodes:
            node = nodes[drawn.id]
            above = list(node.path())[1:]
            assert drawn.parent == (above[0].serial if above else None)
            assert drawn.start == sum(each.n_tokens for each in above)
            assert (drawn.tokens, drawn.blocks) == (node.n_tokens, len(node.blocks))
            assert drawn.holders <= len(self._daemon.scheduler.running)
        hidden = [picture.hidden, *(node.hidden or Hidden() for node in picture.nodes)]
        counted = (
            len(picture.nodes) + sum(each.nodes for each in hidden),
            sum(each.tokens for each in picture.nodes) + sum(each.tokens for each in hidden),
            sum(each.blocks for each in picture.nodes) + sum(each.blocks for each in hidden),
        )
        assert counted == (
            len(nodes),
            sum(node.n_tokens for node in nodes.values()),
            sum(len(node.blocks) for node in nodes.values()),
        ), "drawn and hidden nodes are not all that there are"
        assert {adoption.node for adoption in picture.adoptions} <= nodes.keys()


def _timeless(picture: CachePicture) -> CachePicture:
    """Without ages, and without what is on disk: the fake tier's counters do not show changes."""
    nodes = tuple(replace(node, idle_seconds=0.0, disk_tokens=0) for node in picture.nodes)
    return replace(picture, time=0.0, nodes=nodes, adoptions=())

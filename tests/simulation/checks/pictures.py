"""Pictures of the cache between any two turns, compared with the tree."""

from dataclasses import replace
from random import Random

from engine.values.tree import HiddenNodes, TreeChanges, TreeSnapshot
from engine.watch.feed import Rendered, Renderer
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
        self._last: Rendered | None = None

    def check(self) -> None:
        last, self._last = self._last, self._renderer.render(self._taker.take(), self._last)
        after = self._last.snapshot
        if last is not None:
            before = last.snapshot
            if before.version == after.version:
                assert _timeless(before) == _timeless(after), "another snapshot, the same version"
            assert TreeChanges.between(before, after).applied_to(before) == after
        self._compare(after)

    def _compare(self, picture: TreeSnapshot) -> None:
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
        hidden = [picture.hidden, *(node.hidden or HiddenNodes() for node in picture.nodes)]
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


def _timeless(picture: TreeSnapshot) -> TreeSnapshot:
    """Without ages, and without what is on disk: the fake tier's counters do not show changes."""
    nodes = tuple(replace(node, disk_tokens=0) for node in picture.nodes)
    return replace(picture, time=0.0, seconds=0.0, nodes=nodes, adoptions=(), cost_seconds=0.0)

"""Pictures of caches as they come to be in use, for a page to draw. No model computes them."""

from collections.abc import Iterable
from dataclasses import replace

from engine.values.request import WaitReason
from engine.values.stats import RequestInfo
from engine.values.tree import (
    HiddenNodes,
    HiddenRequests,
    TreeAdoption,
    TreeNamespace,
    TreeNode,
    TreeSnapshot,
)
from tests.contract.fake_engine import PICTURE

BLOCK = 32
LASTING = -1e9
"""When an adoption was, in seconds before now: so it never fades while a test looks."""

HALF_AN_HOUR = 1800.0
SHORT = 60  # prompts
SHARED = 84  # tokens that some of them begin with
LEAF = 266


class Scene:
    """Grows a picture from its first nodes on."""

    def __init__(self) -> None:
        self._nodes: list[TreeNode] = []
        self._requests: list[RequestInfo] = []
        self._adoptions: list[TreeAdoption] = []

    def node(
        self, parent: int | None, tokens: int, *, holders: int = 0, idle_seconds: float = 60.0
    ) -> int:
        """Its id."""
        node_id = len(self._nodes) + 1
        above = self._nodes[parent - 1] if parent else None
        self._nodes.append(
            TreeNode(
                id=node_id,
                parent=parent,
                namespace="0",
                start=above.start + above.tokens if above else 0,
                tokens=tokens,
                disk_tokens=0,
                blocks=-(-tokens // BLOCK),
                tail=tokens % BLOCK,
                holders=holders,
                used_seconds=None if holders else PICTURE.seconds - idle_seconds,
                states=(),
                holes=(),
                next_evicted=None,
                hidden=None,
            )
        )
        return node_id

    def request(
        self, node: int | None, prompt_tokens: int, computed_tokens: int, output_tokens: int = 0
    ) -> None:
        waits_for = None if computed_tokens else WaitReason.SLOTS
        name, counts = f"r{len(self._requests) + 1}", (prompt_tokens, 0, computed_tokens)
        self._requests.append(
            RequestInfo(name, 0, waits_for, *counts, output_tokens, blocks=0, node=node)
        )

    def adopted(self, node: int, tokens: int) -> None:
        self._adoptions.append(TreeAdoption(node, tokens, LASTING))

    def evicted_next(self, nodes: Iterable[int]) -> None:
        for place, node_id in enumerate(nodes, start=1):
            self._nodes[node_id - 1] = replace(self._nodes[node_id - 1], next_evicted=place)

    def picture(self, version: int = 2) -> TreeSnapshot:
        nodes = tuple(self._nodes)
        n_tokens = sum(node.tokens for node in nodes)
        return replace(
            PICTURE,
            version=version,
            groups=(),
            disk=None,
            nodes=nodes,
            hidden=HiddenNodes(),
            namespaces=(TreeNamespace("0", "default", len(nodes), n_tokens),),
            requests=tuple(self._requests),
            hidden_requests=HiddenRequests(0, 0),
            adoptions=tuple(self._adoptions),
        )


def agent_beside_short_prompts() -> TreeSnapshot:
    """An agent's 25,000 tokens, 20 prompts that share 84 and 40 that share nothing."""
    scene = Scene()
    oldest = [
        scene.node(None, 20 + 7 * i % 130, idle_seconds=HALF_AN_HOUR) for i in range(SHORT - 20)
    ]
    system = scene.node(None, SHARED, holders=2)
    for i in range(20):
        leaf = scene.node(system, 26 + 11 * i % 90, holders=int(i == 4), idle_seconds=40.0 * i)
        if i == 4:
            scene.request(leaf, 180, 156, 6)
    scene.request(system, 190, 130)
    tools = scene.node(None, 18_304, holders=1)
    scene.node(tools, 1_460, idle_seconds=400.0)
    turn = tools
    for tokens in (704, 1_312, 2_880, 416):
        turn = scene.node(turn, tokens, holders=1)
    scene.node(turn, 266, idle_seconds=20.0)
    scene.request(turn, 25_000, 24_300)
    scene.adopted(turn, 23_616)
    scene.evicted_next(oldest[:3])
    return scene.picture()


def many_leaves() -> TreeSnapshot:
    """240 prompts behind one of 96 tokens. Three run; ten tokens of a leaf have just been found."""
    scene = Scene()
    system = scene.node(None, 96, holders=3)
    leaves = [
        scene.node(system, LEAF if i == 7 else 24 + 37 * i % 170, idle_seconds=8.0 * i)
        for i in range(237)
    ]
    for i in range(3):
        leaf = scene.node(system, 64, holders=1)
        scene.request(leaf, 180, 165 + i, 8)
    scene.adopted(leaves[7], 106)
    scene.evicted_next(leaves[-3:])
    return scene.picture()

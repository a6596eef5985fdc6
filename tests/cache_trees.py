"""Pictures of a cache, without a cache: what is not told is nothing, or 0."""

from pydantic import TypeAdapter

from engine.values.tree import TreeCounters
from server.admin_schema import CacheTree, TreeNode

BLOCK_TOKENS = 16


def node(number: int, parent: int | None, tokens: int, **fields: object) -> TreeNode:
    known = {"id": number, "parent": parent, "namespace": "0", "start": 0, "tokens": tokens}
    blocks = {"blocks": -(-tokens // BLOCK_TOKENS), "tail": tokens % BLOCK_TOKENS}
    still = {
        "disk_tokens": 0,
        "holders": 0,
        "idle_seconds": 0.0,
        "next_evicted": None,
        "hidden": None,
    }
    return TreeNode.model_validate(
        {**known, **blocks, **still, "states": [], "holes": [], **fields}
    )


def counted(**counts: float) -> TreeCounters:
    return TypeAdapter(TreeCounters).validate_python(
        {**dict.fromkeys(TreeCounters.__slots__, 0), **counts}
    )


def cache_tree(**fields: object) -> CacheTree:
    empty = {
        **{"version": 1, "time": 1.8e9, "model": "tiny", "block_tokens": BLOCK_TOKENS},
        "arena": {
            "blocks": 1,
            "free": 1,
            "cached": 0,
            "held": 0,
            "saved_bytes": 0,
            "block_bytes": 1,
        },
        "hidden": {"nodes": 0, "tokens": 0, "blocks": 0},
        "hidden_requests": {"running": 0, "waiting": 0},
        "disk": None,
        **{"nodes": [], "groups": [], "namespaces": [], "requests": [], "counters": counted()},
        **{"adoptions": [], "recent_hits": []},
    }
    return CacheTree.model_validate({**empty, **fields})

"""The ids of namespaces, by which the API names them."""

from collections.abc import Iterable
from functools import lru_cache

from engine.values.stats import UNSALTED_ID
from kvstore.tokens import Digest, root_digest
from kvstore.types import Namespace


@lru_cache(maxsize=2048)  # more than the sequences that are live by default
def namespace_id(namespace: Namespace) -> str:
    """The id of the namespace of an adapter or a salt; UNSALTED_ID for the model's own."""
    is_own = not (namespace.adapter or namespace.cache_salt)
    return UNSALTED_ID if is_own else _root_id(root_digest(namespace))


def find_namespace(name: str, namespaces: Iterable[Namespace]) -> Namespace | None:
    """Find a namespace by its id."""
    return next((each for each in namespaces if namespace_id(each) == name), None)


def find_root(name: str, roots: Iterable[Digest]) -> Digest | None:
    """Find a namespace by its digest, such as a salted one on disk."""
    return next((root for root in roots if _root_id(root) == name), None)


def _root_id(root: Digest) -> str:
    return root.hex()[:12]

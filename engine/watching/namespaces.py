"""The ids of namespaces in pictures and in the admin API, and the namespaces of such ids.

An id does not reveal the salt. It is the same for as long as the model is, so it also finds what an
earlier daemon has left on disk.
"""

from collections.abc import Iterable

from kvstore.digest import Digest, root_digest
from kvstore.types import Namespace

UNSALTED_ID = "0"


def namespace_id(namespace: Namespace) -> str:
    """That of an adapter or a salt; UNSALTED_ID for the model's own."""
    is_own = not (namespace.adapter or namespace.cache_salt)
    return UNSALTED_ID if is_own else _root_id(root_digest(namespace))


def find_namespace(name: str, namespaces: Iterable[Namespace]) -> Namespace | None:
    return next((each for each in namespaces if namespace_id(each) == name), None)


def find_root(name: str, roots: Iterable[Digest]) -> Digest | None:
    """Of namespaces of which only the digest is known: salted ones, those of former adapters."""
    return next((root for root in roots if _root_id(root) == name), None)


def _root_id(root: Digest) -> str:
    return root.hex()[:12]

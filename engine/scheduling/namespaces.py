"""Which namespace a request's KV belongs to."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvstore.types import DEFAULT_NAMESPACE, Namespace


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Those of one model, which `unsalted` is, and of its adapters, by name.

    An adapter's fingerprint is in the namespace, not its name: a changed one finds nothing.
    """

    unsalted: Namespace = DEFAULT_NAMESPACE
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    def of(self, cache_salt: str, adapter: str) -> Namespace:
        """Of a request. Raises KeyError for an adapter that there is not."""
        fingerprint = self.fingerprints[adapter] if adapter else ""
        return replace(self.unsalted, adapter=fingerprint, cache_salt=cache_salt)


NO_ADAPTERS = Namespaces()

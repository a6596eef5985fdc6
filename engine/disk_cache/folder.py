"""The server's door to a disk cache's directory that no engine has open. Without MLX, at once."""

from kvstore.tier.maintenance import FolderCheck, FolderUse, clear, du, verify
from kvstore.tier.types import TierError

__all__ = ["FolderCheck", "FolderUse", "TierError", "clear", "du", "verify"]

"""The server's door to a disk cache's directory that no engine has open. Without MLX, at once."""

from kvstore.disk.store import FolderCheck, FolderUse, clear, du, verify
from kvstore.disk.types import DiskError

__all__ = ["DiskError", "FolderCheck", "FolderUse", "clear", "du", "verify"]

"""Which role of API key a path needs."""

from server.access.keys import Role

OPEN_PATHS = frozenset(
    {"/health", "/load", "/metrics", "/openapi.json", "/version", "/api/version", "/", "/docs"}
)
"""Monitoring, and the pages, which ask for a key themselves. All other paths, known or not, need a
key.
"""
PAGE_FILES = "/dashboard/"

ADMIN = "/admin"
ADMIN_PATHS = frozenset({ADMIN, "/api/pull", "/api/delete"})
CANCELLATION = "/cancel"


def needed_role(path: str) -> Role | None:
    """The role whose key the path needs; None where it is open."""
    if path in OPEN_PATHS or path.startswith(PAGE_FILES):
        return None
    return Role.ADMIN if path in ADMIN_PATHS or path.startswith(f"{ADMIN}/") else Role.USER


def is_limited(method: str, path: str) -> bool:
    """Whether a request counts against its key's limits: POST requests do, but for cancellation."""
    is_users = needed_role(path) is Role.USER
    return method == "POST" and is_users and not path.endswith(CANCELLATION)

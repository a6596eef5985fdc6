"""`encrypted_content`: reasoning that clients send back where the server stores nothing.

It is the text in base64, not encrypted: the client may read it anyway. A prefix tells it from the
content of other servers.
"""

import base64
import binascii

_PREFIX = "rootstock1:"


def seal(reasoning: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unseal(content: str) -> str:
    """The reasoning; empty for content of other servers."""
    if not content.startswith(_PREFIX):
        return ""
    try:
        return base64.urlsafe_b64decode(content.removeprefix(_PREFIX)).decode()
    except (binascii.Error, ValueError):
        return ""

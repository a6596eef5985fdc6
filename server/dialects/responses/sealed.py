"""Reasoning that a client carries for a server that stores nothing: `encrypted_content`.

It is the text itself, encoded: the one who asks may read it anyway. A mark tells it from what
another server made.
"""

import base64
import binascii

_MARK = "rootstock1:"


def seal(reasoning: str) -> str:
    return _MARK + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unseal(content: str) -> str:
    """The reasoning; none of what was not sealed here."""
    if not content.startswith(_MARK):
        return ""
    try:
        return base64.urlsafe_b64decode(content.removeprefix(_MARK)).decode()
    except (binascii.Error, ValueError):
        return ""

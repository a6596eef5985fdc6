"""What a chat template makes of roles, told by trying."""

from typing import Literal

from engine.types import Tokenizer

LateSystemRole = Literal["system", "user"]

_WORD = "latesystemword"
_CONVERSATION = (
    {"role": "system", "content": "A"},
    {"role": "user", "content": "B"},
    {"role": "system", "content": _WORD},
)


def late_system_role(tokenizer: Tokenizer) -> LateSystemRole:
    """The role for what the system says behind the conversation's beginning: the user's where the
    template refuses system messages there, or leaves them out.
    """
    try:
        prompt = tokenizer.apply_chat_template(_CONVERSATION)
    except ValueError:
        return "user"
    return "system" if _WORD in tokenizer.decode(prompt) else "user"

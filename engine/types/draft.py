"""Where drafts come from."""

from enum import StrEnum


class DraftSource(StrEnum):
    """What a draft is taken from."""

    GRAMMAR = "grammar"  # a guide allows no other continuation
    PREDICTION = "prediction"  # the request's own
    TREE = "tree"  # what was cached behind the same tokens
    OWN = "own"  # the request's prompt and output, where they repeat
    ANSWERS = "answers"  # other outputs of the namespace

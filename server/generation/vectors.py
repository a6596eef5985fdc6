"""Vectors of texts, float32: cut, made as long as one, and compared."""

from base64 import b64encode
from math import exp
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from engine.values.model import Embedder, Reranker

Vector: TypeAlias = npt.NDArray[np.float32]


def vector(pooled: bytes, embedder: Embedder, dimensions: int | None = None) -> Vector:
    """What the engine has pooled, as the checkpoint has vectors, or the front of that."""
    found = np.frombuffer(pooled, "<f4")[:dimensions]
    return unit(found) if embedder.normalized else found


def unit(found: Vector) -> Vector:
    """Of a length of 1, unless all is 0."""
    length = np.float32(np.linalg.norm(found))
    return found / length if length else found


def cosine(left: Vector, right: Vector) -> float:
    return float(unit(left) @ unit(right))


def score(pooled: bytes, reranker: Reranker) -> float:
    """Of the one number that a reranker makes of a pair."""
    (number,) = np.frombuffer(pooled, "<f4").tolist()
    if not reranker.has_sigmoid:
        return float(number)
    grown = exp(-abs(number))  # which never overflows
    return 1 / (1 + grown) if number >= 0 else grown / (1 + grown)


def base64(found: Vector) -> str:
    """Little-endian float32, as OpenAI's clients read it."""
    return b64encode(found.astype("<f4").tobytes()).decode()

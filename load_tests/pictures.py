"""Pictures like photos, drawn from a seed, as the `data:` URLs that requests carry."""

import base64
import io
import math
import random

import numpy as np
from PIL import Image

TOKEN_PIXELS = 32  # along a side of what one token of the checkpoint `vision` stands for
DETAIL_PIXELS = 8  # along a side of what has a colour of its own
QUALITY = 85  # of the JPEG
MOST_TOKENS = 16_384  # the largest picture that the checkpoint's processor leaves as it is


def picture(rng: random.Random, n_tokens: int) -> str:
    """A JPEG of `n_tokens` tokens: a fraction of the tokens along its height, the rest along its
    width, as near to a square as the number allows.
    """
    if not 1 <= n_tokens <= MOST_TOKENS:
        raise ValueError(f"a picture has 1 to {MOST_TOKENS} tokens, not {n_tokens}")
    rows = max(side for side in range(1, math.isqrt(n_tokens) + 1) if n_tokens % side == 0)
    size = n_tokens // rows * TOKEN_PIXELS, rows * TOKEN_PIXELS
    details = size[1] // DETAIL_PIXELS, size[0] // DETAIL_PIXELS, 3
    colours = np.frombuffer(rng.randbytes(math.prod(details)), np.uint8).reshape(details)
    file = io.BytesIO()
    image = Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC)
    image.save(file, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"

"""The tests. Whatever they start computes products of float32 in full on a GPU, too.

MLX rounds the factors to TF32 there by default. Numbers are compared with mlx-lm's, and a router or
a draft that is as good as tied would decide otherwise in a batch of another shape.
"""

import os

os.environ["MLX_ENABLE_TF32"] = "0"

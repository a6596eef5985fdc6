"""The layers to prove: head sizes up to 256, all formats, drafts, windows, sinks, grouped heads,
and how the work may be shared out in a thread group.
"""

import mlx.core as mx

from engine.values.settings import KVFormat
from tests.kernel_proof.cases import layer

LAYERS = [
    layer((8, 8), dtype=mx.float32, block=4),
    layer((16, 32), group=4, width=2),
    layer((64, 64), group=4),
    layer((64, 64), block=1, dtype=mx.float16),
    layer((64, 64), block=3, kv_heads=1, simds=8, most_entries=8),
    layer((64, 64), group=8, window=24, has_sinks=True, width=2),
    layer((64, 64), group=8, has_sinks=True, batch=2, dtype=mx.float32),
    layer((64, 64), kv_heads=3, group=1, lanes=4, most_entries=2),
    layer((80, 80), group=1, block=8, width=2),
    layer((96, 96), block=8),
    layer((96, 96), block=8, format=KVFormat.K8V4, width=2),
    layer((96, 128), format=KVFormat.Q8),
    layer((112, 112), kv_heads=1),
    layer((128, 64), lanes=8, simds=2),
    layer(),
    layer(block=32, dtype=mx.float32, value_dtype=mx.bfloat16),
    layer(kv_heads=1, group=8, block=32, tile=2, lanes=8, batch=2),
    layer(kv_heads=1, group=4, window=20, width=16),
    layer(group=3, block=4, width=3, dtype=mx.float16),
    layer(group=4, dtype=mx.float32, format=KVFormat.F16),
    layer(group=4, format=KVFormat.F16, most_entries=2),
    layer(group=4, format=KVFormat.Q8, most_entries=4),
    layer(block=32, format=KVFormat.K8V4, width=3),
    layer(kv_heads=1, format=KVFormat.Q8, dtype=mx.float32, window=40, simds=1),
    layer((192, 128), window=33, most_entries=2),
    layer((192, 128), format=KVFormat.K8V4, dtype=mx.float16),
    layer((256, 256), most_entries=1),
    layer((256, 256), kv_heads=1, group=4, block=32, width=4, window=48),
]

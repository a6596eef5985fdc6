"""What the random checkpoints look like: plain numbers, without MLX.

`qwen3`, 27 M parameters, has full attention in every layer; of the eight layers of `hybrid`, 28 M
and Granite-shaped, six are Mamba2 and two attention. `agent` is a `qwen3` of two layers, 3.5 M,
with a context of 65,536 tokens and a template that knows tools; `wide` has the KV of a model of 8 G
parameters, 128 KiB a token, and hardly anything else. `real` is of a real model's shape: 28 layers,
1,024 wide, 16 heads of 128 over 8, 151,936 tokens, 596 M parameters in 2.4 GB. `thin` has 48
layers that compute hardly anything: its time is what the host does for each. `vision` is a
`qwen3_vl` of 0.3 G parameters: 20 layers, 1,024 wide, after a tower of 12 layers, 512 wide, which
has a token for each 32 x 32 pixels.
"""

from collections.abc import Mapping
from typing import Any, Literal

Shape = Literal["qwen3", "hybrid", "agent", "wide", "real", "thin", "vision"]

_COMMON: Mapping[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_QWEN3: Mapping[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "intermediate_size": 1344,
    "head_dim": 64,
    "hidden_act": "silu",
}
CONFIGS: Mapping[Shape, Mapping[str, Any]] = {
    "qwen3": _QWEN3,
    "agent": {
        **_QWEN3,
        "hidden_size": 256,
        "intermediate_size": 672,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 65_536,
    },
    "real": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
    },
    "wide": {
        **_QWEN3,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
    },
    "thin": {
        **_QWEN3,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 40_960,
    },
    "vision": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "vocab_size": 4224,
        "max_position_embeddings": 16_384,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "text_config": {
            **_QWEN3,
            "model_type": "qwen3_vl_text",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "vocab_size": 4224,
            "max_position_embeddings": 16_384,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [12, 10, 10],
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 12,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "out_hidden_size": 1024,
            "num_heads": 8,
            "num_position_embeddings": 2304,
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "deepstack_visual_indexes": [3, 6, 9],
        },
    },
    "hybrid": {
        **_COMMON,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "intermediate_size": 1024,
        "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
        "position_embedding_type": "nope",
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.125,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
}


def token_bytes(shape: Shape) -> int:
    """K and V of one token in all layers that keep them, in float32."""
    config = CONFIGS[shape].get("text_config", CONFIGS[shape])
    layers = config.get("layer_types", ["attention"] * config["num_hidden_layers"])
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    n_numbers: int = 2 * layers.count("attention") * config["num_key_value_heads"] * head_dim
    return 4 * n_numbers

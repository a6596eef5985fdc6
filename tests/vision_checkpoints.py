"""Tiny random checkpoints of model families that take images, written at test time.

Names and layouts of weights, configs of processors, tokens and chat templates are those of the
families' published checkpoints.
"""

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.mlx_backend.loading.weights import named_weights
from measuring.random_checkpoint import CONFIGS, random_model, tiny_tokenizer

Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, mx.array]

TEXT_HIDDEN = 64
VISION_HIDDEN = 32
VISION_MLP = 48
VISION_HEADS = 2
VISION_LAYERS = 3


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """A family of checkpoints. `config` names its special tokens instead of their ids."""

    text: str  # the architecture in measuring/configs.yaml
    config: dict[str, Any]
    text_config: dict[str, Any]
    vision_config: dict[str, Any]
    tower: Shapes
    renamed: Callable[[Weights], Weights]  # mlx-lm's names and layouts to the published ones
    eos: str
    tokens: tuple[str, ...]
    template: str
    preprocessor: dict[str, Any]
    processor: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, str] = field(default_factory=dict)  # roles of tokens
    is_flat: bool = False  # the text model's fields stand next to `vision_config`


def _linear(name: str, n_in: int, n_out: int, *, bias: bool = True) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (n_out, n_in)}
    return {**shapes, f"{name}.bias": (n_out,)} if bias else shapes


def _norm(name: str, size: int, *, bias: bool = True) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (size,)}
    return {**shapes, f"{name}.bias": (size,)} if bias else shapes


def _prefixed(prefix: str, *parts: Shapes) -> Shapes:
    return {f"{prefix}{name}": shape for part in parts for name, shape in part.items()}


def _layers(prefix: str, *parts: Shapes) -> Shapes:
    numbers = range(VISION_LAYERS)
    return _prefixed("", *(_prefixed(f"{prefix}.{number}.", *parts) for number in numbers))


def _qwen_patches(patch: int, *, bias: bool) -> Shapes:
    shapes: Shapes = {"patch_embed.proj.weight": (VISION_HIDDEN, 3, 2, patch, patch)}
    return {**shapes, "patch_embed.proj.bias": (VISION_HIDDEN,)} if bias else shapes


def _qwen_attention() -> Shapes:
    return _linear("attn.qkv", VISION_HIDDEN, 3 * VISION_HIDDEN) | _linear(
        "attn.proj", VISION_HIDDEN, VISION_HIDDEN
    )


def _qwen3_merger(name: str, norm: int) -> Shapes:
    merged = 4 * VISION_HIDDEN
    return _prefixed(
        f"{name}.",
        _norm("norm", norm),
        _linear("linear_fc1", merged, merged),
        _linear("linear_fc2", merged, TEXT_HIDDEN),
    )


def _qwen3_tower(n_deepstack: int) -> Shapes:
    return _prefixed(
        "model.visual.",
        _qwen_patches(4, bias=True),
        {"pos_embed.weight": (36, VISION_HIDDEN)},
        _layers(
            "blocks",
            _norm("norm1", VISION_HIDDEN),
            _norm("norm2", VISION_HIDDEN),
            _qwen_attention(),
            _linear("mlp.linear_fc1", VISION_HIDDEN, VISION_MLP),
            _linear("mlp.linear_fc2", VISION_MLP, VISION_HIDDEN),
        ),
        _qwen3_merger("merger", VISION_HIDDEN),
        *(
            _qwen3_merger(f"deepstack_merger_list.{number}", 4 * VISION_HIDDEN)
            for number in range(n_deepstack)
        ),
    )


def _qwen2_merger(*, bias: bool) -> Shapes:
    merged = 4 * VISION_HIDDEN
    return {
        **_norm("merger.ln_q", VISION_HIDDEN, bias=bias),
        **_linear("merger.mlp.0", merged, merged),
        **_linear("merger.mlp.2", merged, TEXT_HIDDEN),
    }


def _qwen2_tower() -> Shapes:
    return _prefixed(
        "visual.",
        _qwen_patches(4, bias=False),
        _layers(
            "blocks",
            _norm("norm1", VISION_HIDDEN),
            _norm("norm2", VISION_HIDDEN),
            _qwen_attention(),
            _linear("mlp.fc1", VISION_HIDDEN, 2 * VISION_HIDDEN),
            _linear("mlp.fc2", 2 * VISION_HIDDEN, VISION_HIDDEN),
        ),
        _qwen2_merger(bias=True),
    )


def _qwen2_5_tower() -> Shapes:
    return _prefixed(
        "visual.",
        _qwen_patches(4, bias=False),
        _layers(
            "blocks",
            _norm("norm1", VISION_HIDDEN, bias=False),
            _norm("norm2", VISION_HIDDEN, bias=False),
            _qwen_attention(),
            _linear("mlp.gate_proj", VISION_HIDDEN, VISION_MLP),
            _linear("mlp.up_proj", VISION_HIDDEN, VISION_MLP),
            _linear("mlp.down_proj", VISION_MLP, VISION_HIDDEN),
        ),
        _qwen2_merger(bias=False),
    )


def _pixtral_tower() -> Shapes:
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    return _prefixed(
        "vision_tower.",
        {"patch_conv.weight": (VISION_HIDDEN, 3, 4, 4), "ln_pre.weight": (VISION_HIDDEN,)},
        _layers(
            "transformer.layers",
            _norm("attention_norm", VISION_HIDDEN, bias=False),
            _norm("ffn_norm", VISION_HIDDEN, bias=False),
            *(
                _linear(f"attention.{name}", VISION_HIDDEN, VISION_HIDDEN, bias=False)
                for name in projections
            ),
            _linear("feed_forward.gate_proj", VISION_HIDDEN, VISION_MLP, bias=False),
            _linear("feed_forward.up_proj", VISION_HIDDEN, VISION_MLP, bias=False),
            _linear("feed_forward.down_proj", VISION_MLP, VISION_HIDDEN, bias=False),
        ),
    )


def _pixtral_projector() -> Shapes:
    return _prefixed(
        "multi_modal_projector.",
        _linear("linear_1", VISION_HIDDEN, TEXT_HIDDEN),
        _linear("linear_2", TEXT_HIDDEN, TEXT_HIDDEN),
    )


def _mistral3_projector() -> Shapes:
    return _prefixed(
        "multi_modal_projector.",
        _norm("norm", VISION_HIDDEN, bias=False),
        _linear("patch_merger.merging_layer", 4 * VISION_HIDDEN, VISION_HIDDEN, bias=False),
        _linear("linear_1", VISION_HIDDEN, TEXT_HIDDEN, bias=False),
        _linear("linear_2", TEXT_HIDDEN, TEXT_HIDDEN, bias=False),
    )


def _gemma3_tower() -> Shapes:
    projections = ("q_proj", "k_proj", "v_proj", "out_proj")
    return {
        **_prefixed(
            "vision_tower.vision_model.",
            {
                "embeddings.patch_embedding.weight": (VISION_HIDDEN, 3, 4, 4),
                "embeddings.patch_embedding.bias": (VISION_HIDDEN,),
                "embeddings.position_embedding.weight": (36, VISION_HIDDEN),
            },
            _layers(
                "encoder.layers",
                _norm("layer_norm1", VISION_HIDDEN),
                _norm("layer_norm2", VISION_HIDDEN),
                *(
                    _linear(f"self_attn.{name}", VISION_HIDDEN, VISION_HIDDEN)
                    for name in projections
                ),
                _linear("mlp.fc1", VISION_HIDDEN, VISION_MLP),
                _linear("mlp.fc2", VISION_MLP, VISION_HIDDEN),
            ),
            _norm("post_layernorm", VISION_HIDDEN),
        ),
        "multi_modal_projector.mm_input_projection_weight": (VISION_HIDDEN, TEXT_HIDDEN),
        "multi_modal_projector.mm_soft_emb_norm.weight": (VISION_HIDDEN,),
    }


def _gemma4_tower() -> Shapes:
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    head = VISION_HIDDEN // VISION_HEADS
    return {
        **_prefixed(
            "model.vision_tower.",
            {
                "patch_embedder.input_proj.weight": (VISION_HIDDEN, 12),
                "patch_embedder.position_embedding_table": (2, 128, VISION_HIDDEN),
            },
            _layers(
                "encoder.layers",
                *(
                    _linear(f"self_attn.{name}.linear", VISION_HIDDEN, VISION_HIDDEN, bias=False)
                    for name in projections
                ),
                _norm("self_attn.q_norm", head, bias=False),
                _norm("self_attn.k_norm", head, bias=False),
                _linear("mlp.gate_proj.linear", VISION_HIDDEN, VISION_MLP, bias=False),
                _linear("mlp.up_proj.linear", VISION_HIDDEN, VISION_MLP, bias=False),
                _linear("mlp.down_proj.linear", VISION_MLP, VISION_HIDDEN, bias=False),
                *(_norm(name, VISION_HIDDEN, bias=False) for name in norms),
            ),
        ),
        "model.embed_vision.embedding_projection.weight": (TEXT_HIDDEN, VISION_HIDDEN),
    }


def _kimi_tower() -> Shapes:
    merged = 4 * VISION_HIDDEN
    return {
        **_prefixed(
            "vision_tower.",
            {
                "patch_embed.proj.weight": (VISION_HIDDEN, 3, 4, 4),
                "patch_embed.proj.bias": (VISION_HIDDEN,),
                "patch_embed.pos_emb.weight": (6, 6, VISION_HIDDEN),
            },
            _layers(
                "encoder.blocks",
                _norm("norm0", VISION_HIDDEN),
                _norm("norm1", VISION_HIDDEN),
                _linear("wqkv", VISION_HIDDEN, 3 * VISION_HIDDEN),
                _linear("wo", VISION_HIDDEN, VISION_HIDDEN),
                _linear("mlp.fc0", VISION_HIDDEN, VISION_MLP),
                _linear("mlp.fc1", VISION_MLP, VISION_HIDDEN),
            ),
            _norm("encoder.final_layernorm", VISION_HIDDEN),
        ),
        **_prefixed(
            "multi_modal_projector.",
            _norm("pre_norm", VISION_HIDDEN),
            _linear("linear_1", merged, merged),
            _linear("linear_2", merged, TEXT_HIDDEN),
        ),
    }


def _llama4_tower() -> Shapes:
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    return {
        **_prefixed(
            "vision_model.",
            {
                "class_embedding": (VISION_HIDDEN,),
                "positional_embedding_vlm": (17, VISION_HIDDEN),
                "patch_embedding.linear.weight": (VISION_HIDDEN, 48),
            },
            _norm("layernorm_pre", VISION_HIDDEN),
            _norm("layernorm_post", VISION_HIDDEN),
            _layers(
                "model.layers",
                _norm("input_layernorm", VISION_HIDDEN),
                _norm("post_attention_layernorm", VISION_HIDDEN),
                *(
                    _linear(f"self_attn.{name}", VISION_HIDDEN, VISION_HIDDEN)
                    for name in projections
                ),
                _linear("mlp.fc1", VISION_HIDDEN, 4 * VISION_HIDDEN),
                _linear("mlp.fc2", 4 * VISION_HIDDEN, VISION_HIDDEN),
            ),
            _linear("vision_adapter.mlp.fc1", 4 * VISION_HIDDEN, VISION_MLP, bias=False),
            _linear("vision_adapter.mlp.fc2", VISION_MLP, VISION_MLP, bias=False),
        ),
        "multi_modal_projector.linear_1.weight": (TEXT_HIDDEN, VISION_MLP),
    }


def _lfm2_tower() -> Shapes:
    merged, projections = 4 * VISION_HIDDEN, ("q_proj", "k_proj", "v_proj", "out_proj")
    return {
        **_prefixed(
            "vision_tower.",
            _linear("embeddings.patch_embedding", 48, VISION_HIDDEN),
            {"embeddings.position_embedding.weight": (36, VISION_HIDDEN)},
            _layers(
                "encoder.layers",
                _norm("layer_norm1", VISION_HIDDEN),
                _norm("layer_norm2", VISION_HIDDEN),
                *(
                    _linear(f"self_attn.{name}", VISION_HIDDEN, VISION_HIDDEN)
                    for name in projections
                ),
                _linear("mlp.fc1", VISION_HIDDEN, VISION_MLP),
                _linear("mlp.fc2", VISION_MLP, VISION_HIDDEN),
            ),
            _norm("post_layernorm", VISION_HIDDEN),
        ),
        **_prefixed(
            "multi_modal_projector.",
            _norm("layer_norm", merged),
            _linear("linear_1", merged, VISION_MLP),
            _linear("linear_2", VISION_MLP, TEXT_HIDDEN),
        ),
    }


def _as_mlx_lm(weights: Weights) -> Weights:
    return weights


def _tied(weights: Weights) -> Weights:
    """Without the output head, which is the embedding."""
    return {name: array for name, array in weights.items() if "lm_head" not in name}


def _below_model(weights: Weights) -> Weights:
    """`model.language_model.layers...`, and the output head outside."""
    return {
        name.removeprefix("language_model.")
        if name.startswith("language_model.lm_head")
        else name.replace("language_model.model.", "model.language_model.", 1): array
        for name, array in weights.items()
    }


def _flat(weights: Weights) -> Weights:
    """`model.layers...`, next to `visual`."""
    return {name.removeprefix("language_model."): array for name, array in weights.items()}


def _llama4(weights: Weights) -> Weights:
    """The experts' projections joined, `[experts, in, out]`."""
    joint = dict(weights)
    for name in [name for name in weights if name.endswith(".experts.gate_proj.weight")]:
        experts = name.removesuffix("gate_proj.weight")
        gate, up, down = (
            joint.pop(f"{experts}{part}_proj.weight").swapaxes(1, 2)
            for part in ("gate", "up", "down")
        )
        joint[f"{experts}gate_up_proj"] = mx.concatenate([gate, up], axis=-1)
        joint[f"{experts}down_proj"] = down
    return joint


def _qwen3_5(weights: Weights) -> Weights:
    """Convolutions as PyTorch has them, and norms without the one that mlx-lm adds."""
    norms = (
        ".input_layernorm.weight",
        ".post_attention_layernorm.weight",
        "model.norm.weight",
        ".q_norm.weight",
        ".k_norm.weight",
    )
    changed = {
        name: array.moveaxis(1, 2)
        if name.endswith("conv1d.weight")
        else array - 1.0
        if name.endswith(norms)
        else array
        for name, array in weights.items()
    }
    return _below_model(changed)


QWEN_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
QWEN_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for item in message.content %}"
    "{%- if item.type == 'image' or 'image' in item or 'image_url' in item %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif 'text' in item %}{{- item.text }}"
    "{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MISTRAL_TOKENS = ("<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
MISTRAL_TEMPLATE = (
    "{{- '<s>' }}"
    "{%- for message in messages %}"
    "{%- if message.role in ('user', 'system', 'tool') %}{{- '[INST]' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for block in message.content %}"
    "{%- if block.type == 'text' %}{{- block.text }}"
    "{%- elif block.type in ('image', 'image_url') %}{{- '[IMG]' }}"
    "{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '[/INST]' }}"
    "{%- else %}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for block in message.content %}{{- block.text }}{%- endfor %}{%- endif %}"
    "{{- '</s>' }}"
    "{%- endif %}"
    "{%- endfor %}"
)
GEMMA3_TOKENS = (
    "<pad>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
)
GEMMA3_TEMPLATE = (
    "{{ '<bos>' }}"
    "{%- for message in messages -%}"
    "{%- set role = 'model' if message.role == 'assistant' else message.role -%}"
    "{{ '<start_of_turn>' + role + '\n' }}"
    "{%- if message.content is string -%}{{ message.content | trim }}"
    "{%- else -%}{%- for item in message.content -%}"
    "{%- if item.type == 'image' -%}{{ '<start_of_image>' }}"
    "{%- elif item.type == 'text' -%}{{ item.text | trim }}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ '<end_of_turn>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
GEMMA4_TOKENS = ("<pad>", "<bos>", "<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>")
GEMMA4_TEMPLATE = (
    "{{ '<bos>' }}"
    "{%- for message in messages -%}"
    "{%- set role = 'model' if message.role == 'assistant' else message.role -%}"
    "{{ '<|turn>' + role + '\n' }}"
    "{%- if message.content is string -%}{{ message.content | trim }}"
    "{%- else -%}{%- for item in message.content -%}"
    "{%- if item.type == 'image' -%}{{ '\n\n<|image|>\n\n' }}"
    "{%- elif item.type == 'text' -%}{{ item.text | trim }}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ '<turn|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|turn>model\n' }}{%- endif -%}"
)
KIMI_TOKENS = (
    "[BOS]",
    "[PAD]",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_start|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
)
KIMI_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- set kind = message.role if message.role in ('assistant', 'system') else 'user' -%}"
    "{{ '<|im_' + kind + '|>' + message.role + '<|im_middle|>' }}"
    "{%- if message.content is string -%}{{ message.content + '<|im_end|>' }}"
    "{%- else -%}{%- for content in message.content -%}"
    "{%- if content.type == 'image' or 'image' in content or 'image_url' in content -%}"
    "{{ '<|media_start|>image<|media_content|><|media_pad|><|media_end|>' }}"
    "{%- else -%}{{ content.text }}"
    "{%- endif -%}{%- endfor -%}{{ '<|im_end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_assistant|>assistant<|im_middle|>' }}{%- endif -%}"
)
LLAMA4_TOKENS = (
    "<|begin_of_text|>",
    "<|header_start|>",
    "<|header_end|>",
    "<|eot|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "<|image|>",
    "<|patch|>",
)
LLAMA4_TEMPLATE = (
    "{{- '<|begin_of_text|>' }}"
    "{%- for message in messages %}"
    "{{- '<|header_start|>' + message.role + '<|header_end|>\n\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for content in message.content %}"
    "{%- if content.type == 'image' %}{{- '<|image|>' }}"
    "{%- elif content.type == 'text' %}{{- content.text }}"
    "{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|eot|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|header_start|>assistant<|header_end|>\n\n' }}"
    "{%- endif %}"
)
LFM2_TOKENS = (
    "<|startoftext|>",
    "<image>",
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    *(
        f"<|img_row_{row}_col_{column}|>"
        for row in range(1, 5)
        for column in range(1, 5)
        if row * column <= 4
    ),
)
LFM2_TEMPLATE = (
    "{{- '<|startoftext|>' }}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for item in message.content %}"
    "{%- if item.type == 'image' %}{{- '<image>' }}"
    "{%- elif item.type == 'text' %}{{- item.text }}"
    "{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
CLIP_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALF_COLOURS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
DONE = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True}


def _qwen3_vision(name: str, deepstack: list[int]) -> dict[str, Any]:
    return {
        "model_type": name,
        "depth": VISION_LAYERS,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": VISION_MLP,
        "out_hidden_size": TEXT_HIDDEN,
        "num_heads": VISION_HEADS,
        "num_position_embeddings": 36,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": deepstack,
    }


QWEN3_PREPROCESSOR = {
    "size": {"longest_edge": 2304, "shortest_edge": 256},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    **HALF_COLOURS,
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
QWEN2_PREPROCESSOR = {
    **DONE,
    "min_pixels": 256,
    "max_pixels": 2304,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    **CLIP_COLOURS,
    "image_processor_type": "Qwen2VLImageProcessor",
}
PIXTRAL_VISION = {
    "model_type": "pixtral",
    "num_hidden_layers": VISION_LAYERS,
    "hidden_size": VISION_HIDDEN,
    "head_dim": VISION_HIDDEN // VISION_HEADS,
    "intermediate_size": VISION_MLP,
    "num_attention_heads": VISION_HEADS,
    "num_channels": 3,
    "patch_size": 4,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
MROPE = {"mrope_section": [4, 2, 2]}

VISION_FAMILIES = {
    "qwen3_vl": VisionFamily(
        text="qwen3_vl",
        config=QWEN_IDS,
        text_config={
            "model_type": "qwen3_vl_text",
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, **MROPE},
        },
        vision_config=_qwen3_vision("qwen3_vl", [0, 1]),
        tower=_qwen3_tower(2),
        renamed=_below_model,
        eos="<|im_end|>",
        tokens=QWEN_TOKENS,
        template=QWEN_TEMPLATE,
        preprocessor=QWEN3_PREPROCESSOR,
    ),
    "pixtral": VisionFamily(
        text="pixtral",
        config={
            "image_token_index": "[IMG]",
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "projector_hidden_act": "gelu",
        },
        text_config={"model_type": "mistral", "rope_theta": 1000000000.0},
        vision_config={**PIXTRAL_VISION, "image_size": 32},
        tower=_pixtral_tower() | _pixtral_projector(),
        renamed=_as_mlx_lm,
        eos="</s>",
        tokens=MISTRAL_TOKENS,
        template=MISTRAL_TEMPLATE,
        preprocessor={
            **DONE,
            **CLIP_COLOURS,
            "size": {"longest_edge": 32},
            "patch_size": {"height": 4, "width": 4},
            "rescale_factor": 1 / 255,
            "resample": 3,
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
        },
        processor={
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "patch_size": 4,
            "processor_class": "PixtralProcessor",
        },
    ),
    "gemma3": VisionFamily(
        text="gemma3",
        config={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "mm_tokens_per_image": 9,
        },
        text_config={},
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": VISION_MLP,
            "num_attention_heads": VISION_HEADS,
            "num_hidden_layers": VISION_LAYERS,
            "image_size": 24,
            "patch_size": 4,
            "vision_use_head": False,
        },
        tower=_gemma3_tower(),
        renamed=_tied,
        eos="<end_of_turn>",
        tokens=GEMMA3_TOKENS,
        template=GEMMA3_TEMPLATE,
        preprocessor={
            **DONE,
            **HALF_COLOURS,
            "do_pan_and_scan": None,
            "image_seq_length": 9,
            "resample": 2,
            "rescale_factor": 1 / 255,
            "size": {"height": 24, "width": 24},
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
        },
        processor={"image_seq_length": 9, "processor_class": "Gemma3Processor"},
        tokenizer={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    ),
    "qwen2_5_vl": VisionFamily(
        text="qwen2_vl",
        config=QWEN_IDS,
        text_config={
            "model_type": "qwen2_5_vl",
            "rope_scaling": {"type": "mrope", **MROPE},
        },
        vision_config={
            "model_type": "qwen2_5_vl",
            "depth": VISION_LAYERS,
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": VISION_MLP,
            "out_hidden_size": TEXT_HIDDEN,
            "num_heads": VISION_HEADS,
            "hidden_act": "silu",
            "in_chans": 3,
            "patch_size": 4,
            "spatial_patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        tower=_qwen2_5_tower(),
        renamed=_flat,
        eos="<|im_end|>",
        tokens=QWEN_TOKENS,
        template=QWEN_TEMPLATE,
        preprocessor={**QWEN2_PREPROCESSOR, "processor_class": "Qwen2_5_VLProcessor"},
        is_flat=True,
    ),
    "qwen3_5": VisionFamily(
        text="qwen3_5",
        config=QWEN_IDS,
        text_config={
            "rope_parameters": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
                "rope_theta": 100000,
                "partial_rotary_factor": 0.5,
            }
        },
        vision_config=_qwen3_vision("qwen3_5", []),
        tower=_qwen3_tower(0),
        renamed=_qwen3_5,
        eos="<|im_end|>",
        tokens=QWEN_TOKENS,
        template=QWEN_TEMPLATE,
        preprocessor=QWEN3_PREPROCESSOR,
    ),
    "qwen2_vl": VisionFamily(
        text="qwen2_vl",
        config=QWEN_IDS,
        text_config={"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", **MROPE}},
        vision_config={
            "model_type": "qwen2_vl",
            "depth": VISION_LAYERS,
            "embed_dim": VISION_HIDDEN,
            "hidden_size": TEXT_HIDDEN,
            "mlp_ratio": 2,
            "num_heads": VISION_HEADS,
            "in_chans": 3,
            "patch_size": 4,
            "spatial_patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        tower=_qwen2_tower(),
        renamed=_flat,
        eos="<|im_end|>",
        tokens=QWEN_TOKENS,
        template=QWEN_TEMPLATE,
        preprocessor={**QWEN2_PREPROCESSOR, "processor_class": "Qwen2VLProcessor"},
        is_flat=True,
    ),
    "mistral3": VisionFamily(
        text="mistral3",
        config={
            "image_token_index": "[IMG]",
            "vision_feature_layer": -1,
            "spatial_merge_size": 2,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
        },
        text_config={"model_type": "mistral", "rope_theta": 1000000000.0},
        vision_config={**PIXTRAL_VISION, "image_size": 48},
        tower=_pixtral_tower() | _mistral3_projector(),
        renamed=_as_mlx_lm,
        eos="</s>",
        tokens=MISTRAL_TOKENS,
        template=MISTRAL_TEMPLATE,
        preprocessor={
            **DONE,
            **CLIP_COLOURS,
            "size": {"longest_edge": 48},
            "patch_size": {"height": 4, "width": 4},
            "rescale_factor": 1 / 255,
            "resample": 3,
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
        },
        processor={
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "patch_size": 4,
            "spatial_merge_size": 2,
            "processor_class": "PixtralProcessor",
        },
    ),
    "gemma4": VisionFamily(
        text="gemma4",
        config={
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "vision_soft_tokens_per_image": 70,
        },
        text_config={
            "vocab_size": 320,
            "use_bidirectional_attention": "vision",
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "pad_token_id": 0,
        },
        vision_config={
            "model_type": "gemma4_vision",
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": VISION_MLP,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": VISION_HEADS,
            "num_key_value_heads": VISION_HEADS,
            "head_dim": VISION_HIDDEN // VISION_HEADS,
            "global_head_dim": VISION_HIDDEN // VISION_HEADS,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
            "default_output_length": 70,
            "patch_size": 2,
            "position_embedding_size": 128,
            "pooling_kernel_size": 3,
            "use_clipped_linears": False,
            "standardize": False,
        },
        tower=_gemma4_tower(),
        renamed=_below_model,
        eos="<turn|>",
        tokens=GEMMA4_TOKENS,
        template=GEMMA4_TEMPLATE,
        preprocessor={
            **DONE,
            "do_normalize": False,
            "image_mean": [0.0, 0.0, 0.0],
            "image_std": [1.0, 1.0, 1.0],
            "image_seq_length": 70,
            "max_soft_tokens": 70,
            "patch_size": 2,
            "pooling_kernel_size": 3,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "image_processor_type": "Gemma4ImageProcessor",
            "processor_class": "Gemma4Processor",
        },
        processor={"image_seq_length": 70, "processor_class": "Gemma4Processor"},
        tokenizer={"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
    ),
    "kimi_vl": VisionFamily(
        text="kimi_vl",
        config={"media_placeholder_token_id": "<|media_pad|>", "pad_token_id": "[PAD]"},
        text_config={"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1},
        vision_config={
            "model_type": "moonvit",
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": VISION_MLP,
            "num_attention_heads": VISION_HEADS,
            "num_hidden_layers": VISION_LAYERS,
            "patch_size": 4,
            "init_pos_emb_height": 6,
            "init_pos_emb_width": 6,
            "merge_kernel_size": [2, 2],
        },
        tower=_kimi_tower(),
        renamed=_as_mlx_lm,
        eos="<|im_end|>",
        tokens=KIMI_TOKENS,
        template=KIMI_TEMPLATE,
        preprocessor={
            **HALF_COLOURS,
            "in_token_limit": 144,
            "merge_kernel_size": [2, 2],
            "num_pooled_tokens": 36,
            "pad_input": True,
            "patch_size": 4,
            "image_processor_type": "KimiVLImageProcessor",
            "processor_class": "KimiVLProcessor",
        },
    ),
    "llama4": VisionFamily(
        text="llama4",
        config={
            "image_token_index": "<|patch|>",
            "boi_token_index": "<|image_start|>",
            "eoi_token_index": "<|image_end|>",
        },
        text_config={},
        vision_config={
            "model_type": "llama4_vision_model",
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 4 * VISION_HIDDEN,
            "num_attention_heads": VISION_HEADS,
            "num_hidden_layers": VISION_LAYERS,
            "num_channels": 3,
            "image_size": 16,
            "patch_size": 4,
            "pixel_shuffle_ratio": 0.5,
            "projector_input_dim": VISION_MLP,
            "projector_output_dim": VISION_MLP,
            "vision_output_dim": VISION_MLP,
            "hidden_act": "gelu",
            "initializer_range": 0.02,
            "norm_eps": 1e-5,
            "projector_dropout": 0.0,
            "rope_theta": 10000,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
        },
        tower=_llama4_tower(),
        renamed=_llama4,
        eos="<|eot|>",
        tokens=LLAMA4_TOKENS,
        template=LLAMA4_TEMPLATE,
        preprocessor={
            **DONE,
            **HALF_COLOURS,
            "max_patches": 6,
            "resample": 2,
            "rescale_factor": 1 / 255,
            "resize_to_max_canvas": False,
            "size": {"height": 16, "width": 16},
            "image_processor_type": "Llama4ImageProcessorFast",
            "processor_class": "Llama4Processor",
        },
        processor={
            "patch_size": 4,
            "pixel_shuffle_ratio": 0.5,
            "fake_image_token": "<|image|>",
            "image_token": "<|image|>",
            "processor_class": "Llama4Processor",
        },
    ),
    "lfm2_vl": VisionFamily(
        text="lfm2-vl",
        config={
            "image_token_id": "<image>",
            "downsample_factor": 2,
            "projector_hidden_size": VISION_MLP,
            "projector_hidden_act": "gelu",
            "projector_bias": True,
            "tile_size": 16,
        },
        text_config={},
        vision_config={
            "model_type": "siglip2_vision_model",
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": VISION_MLP,
            "num_attention_heads": VISION_HEADS,
            "num_hidden_layers": VISION_LAYERS,
            "num_patches": 36,
            "patch_size": 4,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "vision_use_head": False,
        },
        tower=_lfm2_tower(),
        renamed=_as_mlx_lm,
        eos="<|im_end|>",
        tokens=LFM2_TOKENS,
        template=LFM2_TEMPLATE,
        preprocessor={
            **DONE,
            **HALF_COLOURS,
            "do_image_splitting": True,
            "downsample_factor": 2,
            "encoder_patch_size": 4,
            "max_image_tokens": 12,
            "min_image_tokens": 4,
            "max_pixels_tolerance": 2.0,
            "max_tiles": 4,
            "min_tiles": 2,
            "resample": 2,
            "rescale_factor": 1 / 255,
            "tile_size": 16,
            "use_thumbnail": True,
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "processor_class": "Lfm2VlProcessor",
        },
        processor={"processor_class": "Lfm2VlProcessor"},
    ),
}
"""The families, in the order in which they matter. At most 120 tokens stand for an image."""


REFUSED_FAMILIES = {
    "gemma3n": VisionFamily(
        text="gemma3n",
        config={
            "image_token_id": "<image_soft_token>",
            "boi_token_id": "<start_of_image>",
            "eoi_token_id": "<end_of_image>",
            "vision_soft_tokens_per_image": 9,
        },
        text_config={},
        vision_config={
            "model_type": "gemma3n_vision",
            "architecture": "mobilenetv5_300m_enc",
            "hidden_size": VISION_HIDDEN,
            "vocab_size": 128,
            "vocab_offset": 256,
            "rms_norm_eps": 1e-6,
        },
        tower={
            "model.vision_tower.timm_model.conv_stem.conv.weight": (8, 3, 3, 3),
            "model.embed_vision.embedding.weight": (128, VISION_HIDDEN),
            "model.embed_vision.embedding_projection.weight": (TEXT_HIDDEN, VISION_HIDDEN),
        },
        renamed=_as_mlx_lm,
        eos="<end_of_turn>",
        tokens=GEMMA3_TOKENS,
        template=GEMMA3_TEMPLATE.replace("<start_of_image>", "<image_soft_token>"),
        preprocessor={
            **DONE,
            "do_normalize": False,
            "image_seq_length": 9,
            "resample": 2,
            "rescale_factor": 1 / 255,
            "size": {"height": 96, "width": 96},
            "image_processor_type": "SiglipImageProcessorFast",
            "processor_class": "Gemma3nProcessor",
        },
        processor={"image_seq_length": 9, "processor_class": "Gemma3nProcessor"},
    ),
}
"""Families whose text is served and whose images are refused. Of their towers there are some
weights, to be left out.
"""


def write_vision_checkpoint(
    name: str, parent: Path, *, seed: int = 0, dtype: mx.Dtype = mx.float32
) -> Path:
    """Write a random checkpoint of the family below `parent`, unless it is there already. The same
    arguments write the same weights.
    """
    directory = parent / f"{name}-vision-{seed}-{str(dtype).rpartition('.')[2]}"
    if directory.exists():
        return directory
    parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=parent))
    try:
        family = {**VISION_FAMILIES, **REFUSED_FAMILIES}[name]
        _write_files(unfinished, family, name, seed, dtype)
        unfinished.rename(directory)
    except OSError:
        if not directory.exists():  # another process may have written it first
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def _write_files(
    directory: Path, family: VisionFamily, name: str, seed: int, dtype: mx.Dtype
) -> None:
    base = CONFIGS[family.text]
    text_config = {**base["text_config"], **family.text_config}
    context = base["max_position_embeddings"]
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(list(family.tokens))
    special = {token: tokenizer.token_to_id(token) for token in family.tokens}
    config = {
        "model_type": name,
        **{key: special.get(value, value) for key, value in family.config.items()},
        "vision_config": family.vision_config,
        "eos_token_id": tokenizer.token_to_id(family.eos),
    }
    if family.is_flat:
        config = {**text_config, **config}
    else:
        text_config.setdefault("max_position_embeddings", context)
        config |= {"text_config": text_config, "vocab_size": base["vocab_size"]}
    text = random_model({**base, "text_config": dict(text_config)}, seed, dtype)
    weights = {**family.renamed(named_weights(text)), **_drawn(family.tower, seed, dtype)}
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "pt"})
    _write_json(directory / "config.json", config)
    _write_json(directory / "preprocessor_config.json", family.preprocessor)
    if family.processor:
        _write_json(directory / "processor_config.json", family.processor)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": family.eos,
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
            "extra_special_tokens": family.tokenizer,
            **family.tokenizer,
            "chat_template": family.template,
        },
    )


def _drawn(shapes: Shapes, seed: int, dtype: mx.Dtype) -> Weights:
    """Weights of variance 1 / fan-in, and vectors near those of a new module."""
    keys = mx.random.split(mx.random.key(seed + 1), len(shapes))
    drawn = {}
    for (name, shape), key in zip(shapes.items(), keys, strict=True):
        array = mx.random.normal(shape, key=key)
        if len(shape) > 1:
            array = array * math.prod(shape[1:]) ** -0.5
        else:
            array = 0.1 * array + (1.0 if name.endswith("weight") else 0.0)
        drawn[name] = array.astype(dtype)
    return drawn


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")

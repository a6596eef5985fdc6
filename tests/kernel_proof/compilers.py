"""Compilers of devices, where they are installed, on the text as MLX hands it to them.

CUDA: nvcc makes machine code, and says how many registers it takes and whether any spill; NVRTC,
which MLX compiles with, compiles the same text. Metal:
Apple's compiler is not to be had here, so clang compiles the text as C++ for OpenCL, which has
the same address spaces and does not let pointers change theirs. That finds most of what Apple's
compiler would refuse; it does not show that Apple's accepts the text.

The signature around the text is a reconstruction of the one that MLX writes.
"""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from engine.mlx_backend.gpu.kind import Kind, Stored
from engine.mlx_backend.gpu.source import (
    CUDA,
    INPUTS,
    MERGE_INPUTS,
    MERGE_OUTPUTS,
    METAL,
    OUTPUTS,
    Dialect,
    header,
)
from engine.values.settings import KVFormat
from tests.kernel_proof.cases import layer

ARCHITECTURES = ("80", "90", "120")

KINDS: Mapping[str, Kind] = {
    "16 heads over 8 of 128": layer(kv_heads=8, block=32).kind,
    "32 heads over 8 of 128": layer(kv_heads=8, group=4, block=32).kind,
    "32 heads over 8 of 128, q8": layer(kv_heads=8, group=4, block=32, format=KVFormat.Q8).kind,
    "32 heads over 8 of 128, k8v4": layer(kv_heads=8, group=4, block=32, format=KVFormat.K8V4).kind,
    "64 heads over 8 of 64, window, sinks": layer(
        (64, 64), kv_heads=8, group=8, block=32, window=128, has_sinks=True
    ).kind,
    "8 heads over 4 of 256, window": layer((256, 256), kv_heads=4, block=32, window=512).kind,
    "16 heads over 8 of 192 and 128, float16": layer(
        (192, 128), kv_heads=8, block=32, dtype=mx.float16
    ).kind,
    "16 heads over 8 of 128, float32": layer(kv_heads=8, block=32, dtype=mx.float32).kind,
}

_NUMBERS = {
    "cuda": {
        Stored.FLOAT32: "float",
        Stored.FLOAT16: "__half",
        Stored.BFLOAT16: "__nv_bfloat16",
        Stored.CODES8: "uint8_t",
        Stored.CODES4: "uint8_t",
    },
    "metal": {
        Stored.FLOAT32: "float",
        Stored.FLOAT16: "float16_t",
        Stored.BFLOAT16: "bfloat16_t",
        Stored.CODES8: "uint8_t",
        Stored.CODES4: "uint8_t",
    },
}


def _signature(kind: Kind, language: str, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """The parameters of a kernel, as MLX writes them for arrays of these types."""
    numbers, space = _NUMBERS[language], "device " if language == "metal" else ""
    types = dict.fromkeys(("units", "order", "last_seen", "first_keys", "limits"), "int32_t")
    types |= {"first_parts": "int32_t", "parts": "int32_t", "places": "uint32_t"}
    types |= {"queries": numbers[kind.queries], "output": numbers[kind.queries]}
    types |= {"keys": numbers[kind.keys], "values": numbers[kind.values]}
    parameters = [f"const {space}{types.get(name, 'float')}* {name}" for name in inputs]
    parameters += [f"{space}{types.get(name, 'float')}* {name}" for name in outputs]
    return ",\n    ".join(parameters)


def _kernels(kind: Kind, dialect: Dialect, language: str, function: str, begin: str) -> str:
    """Both kernels. `begin`: what their bodies begin with."""
    passes = (
        ("partials", dialect.partials, INPUTS, OUTPUTS),
        ("merge", dialect.merge, MERGE_INPUTS, MERGE_OUTPUTS),
    )
    return "".join(
        f"{function} void custom_kernel_{kind.name}_{name}(\n"
        f"    {_signature(kind, language, inputs, outputs)}) {{\n{begin}{body}\n}}\n\n"
        for name, body, inputs, outputs in passes
    )


def cuda_text(kind: Kind, includes: str) -> str:
    """What MLX hands to the CUDA compiler, after its own `includes`."""
    kernels = _kernels(kind, CUDA, "cuda", "__global__", "")
    return (
        f"{includes}{header(CUDA, kind.defines())}"
        "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
        f"{kernels}}}  // namespace mlx::core::cu\n"
    )


_CUDA_INCLUDES = """#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cooperative_groups.h>
"""

_NVRTC_INCLUDES = _CUDA_INCLUDES.replace("<cstdint>", "<cuda/std/cstdint>") + (
    "using cuda::std::uint8_t, cuda::std::uint32_t, cuda::std::int32_t;\n"
)

# What the text uses of the language of Metal, and of MLX's own header.
_METAL_AS_OPENCL = """
#define device __global
#define threadgroup __local
#define thread __private
#define constant __constant
#define kernel __kernel
typedef unsigned char uint8_t;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long ulong;
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef struct { ushort bits; } bfloat16_t;
typedef struct { ushort bits; } float16_t;
template <class To, class From> inline To as_type(From x) { return __builtin_bit_cast(To, x); }
float simd_shuffle_xor(float x, ushort mask);
enum class mem_flags { mem_threadgroup };
void threadgroup_barrier(mem_flags flags);
namespace metal { namespace fast { float exp2(float x); } }
"""


def metal_text(kind: Kind) -> str:
    """What MLX hands to the Metal compiler, with stubs of what the language has for it."""
    attributes = "  uint3 threadgroup_position_in_grid, thread_position_in_threadgroup;\n"
    kernels = _kernels(kind, METAL, "metal", "kernel", attributes)
    return f"{_METAL_AS_OPENCL}{header(METAL, kind.defines())}{kernels}"


def check_cuda(folder: Path, nvcc: str) -> Iterator[tuple[str, str]]:
    """Compile each kind by nvcc. Yields a line about it, and a problem or ""."""
    targets = [f"-gencode=arch=compute_{one},code=sm_{one}" for one in ARCHITECTURES]
    source = folder / "kernel.cu"
    for label, kind in KINDS.items():
        source.write_text(cuda_text(kind, _CUDA_INCLUDES), encoding="utf-8")
        command = [nvcc, "-std=c++17", "-Xptxas=-v", "--threads", "0", *targets, "-fatbin"]
        command += ["-o", str(folder / "kernel.fatbin"), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            yield label, f"it does not compile: {done.stderr[:2000]}"
            continue
        spills = [int(one) for one in re.findall(r"(\d+) bytes spill", done.stderr)]
        registers = [int(one) for one in re.findall(r"Used (\d+) registers", done.stderr)]
        problem = "registers spill" if any(spills) or not spills else ""
        yield f"{label}: at most {max(registers)} registers", problem


def check_nvrtc(library: str, includes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Compile each kind by NVRTC, with MLX's options. Yields a line about it, and a problem or "".

    `includes`: folders of CUDA's headers.
    """
    nvrtc = ctypes.CDLL(library)
    options = [b"--device-as-default-execution-space", b"--gpu-architecture=sm_90"]
    options += [f"--include-path={folder}".encode() for folder in includes]
    given = (ctypes.c_char_p * len(options))(*options)
    for label, kind in KINDS.items():
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        text = cuda_text(kind, _NVRTC_INCLUDES).encode()
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None)
        status = nvrtc.nvrtcCompileProgram(program, len(options), given)
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        yield label, f"it does not compile: {log.value.decode()[:2000]}" if status else ""


def check_metal(folder: Path, clang: str) -> Iterator[tuple[str, str]]:
    """Compile each kind by clang. Yields a line about it, and a problem or ""."""
    source = folder / "kernel.clcpp"
    no_generic = "-__opencl_c_generic_address_space,-__opencl_c_pipes,-__opencl_c_device_enqueue"
    flags = ["-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-target", "spir64-unknown-unknown"]
    flags += ["-Xclang", f"-cl-ext={no_generic}", "-Wall", "-Wno-unused", "-O2", "-S", "-emit-llvm"]
    for label, kind in KINDS.items():
        source.write_text(metal_text(kind), encoding="utf-8")
        command = [*clang.split(), *flags, "-o", str(folder / "kernel.ll"), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        yield label, f"it does not compile: {done.stderr[:2000]}" if done.returncode else ""


def found(program: str) -> str:
    """A compiler's command as it is given, or "" where it is not installed."""
    return program if program and shutil.which(program.split(maxsplit=1)[0]) else ""


def headers_of(nvcc: str) -> list[str]:
    """The folders of headers of the CUDA toolkit that `nvcc` belongs to."""
    command = [nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    folders = dict.fromkeys(Path(one).resolve() for one in re.findall(r'"-I([^"]+)"', printed))
    return [str(one) for folder in folders for one in (folder, folder / "cccl")]

"""Keys and values copied straight to their slots of the paged cache, with no temporaries, in one C++ call.

Replaces `kv_cache_update`. A row of slot -1 is skipped, so no byte outside the written slots is read or touched.

Predicts: a concatenation, a mask and an indexed write become two short copies a head; 28 us -> 4 us a layer at decode.
Measured: 17.1 us -> 3.4 us a layer at decode, 57 us -> 5.1 us at prefill of 2 x 128; isolated and warm, CPU time of
one thread of an AMD EPYC (family 26), torch 2.13.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from harness.candidate import Rewrite, Site, When

REWRITE = Rewrite(
    name="kv_cache_update_in_place",
    replaces=(("kv_cache_update",),),
    backend="cpp",
    target="decode",
    when=When(device=("cpu",)),
)

SOURCE = r"""
#include <cstdint>
#include <cstring>

// Keys [tokens, heads, head_bytes] and values, `*_stride` bytes between rows; cache [pages, heads, page, 2 head_bytes].
extern "C" void run(int64_t tokens, int64_t heads, int64_t head_bytes, int64_t page, const char* key,
                    int64_t key_stride, const char* value, int64_t value_stride, const int64_t* slots, char* cache) {
    for (int64_t t = 0; t < tokens; ++t) {
        if (slots[t] < 0) continue;
        char* slot = cache + (slots[t] / page * heads * page + slots[t] % page) * 2 * head_bytes;
        for (int64_t h = 0; h < heads; ++h, slot += page * 2 * head_bytes) {
            std::memcpy(slot, key + t * key_stride + h * head_bytes, head_bytes);
            std::memcpy(slot + head_bytes, value + t * value_stride + h * head_bytes, head_bytes);
        }
    }
}
"""


@functools.cache
def _library() -> ctypes.CDLL:
    """The compiled source, built once a process into the harness's build directory."""
    folder = Path(os.environ.get("OPTIMIZE_BUILD_DIR") or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"kv_cache_update-{hashlib.sha256(SOURCE.encode()).hexdigest()[:16]}"
    library = folder / f"{stem}.so"
    if not library.exists():
        source, built = folder / f"{stem}.{os.getpid()}.cpp", folder / f"{stem}.{os.getpid()}.so"
        source.write_text(SOURCE)
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        made = subprocess.run(["g++", *flags, str(source), "-o", str(built)], capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"g++ failed:\n{made.stderr}")
        built.replace(library)
    return ctypes.CDLL(str(library))


@dataclass
class State:
    function: Any


def prepare(site: Site) -> State:
    function = _library().run
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [number] * 4 + [pointer, number, pointer, number, pointer, pointer]
    function.restype = None
    return State(function)


def run(inputs: Mapping[str, Tensor], caches: Mapping[str, Tensor], state: State) -> dict[str, Tensor]:
    cache = caches["kv_cache"]
    if not cache.is_contiguous():
        raise ValueError("the cache must be contiguous")
    key, value = inputs["key"].contiguous(), inputs["value"]
    value = value if value.stride(-1) == 1 else value.contiguous()
    slots = inputs["slot_mapping"].contiguous()
    tokens, heads, head_dim = key.shape
    size = key.element_size()
    state.function(
        tokens,
        heads,
        head_dim * size,
        cache.shape[2],
        key.data_ptr(),
        heads * head_dim * size,
        value.data_ptr(),
        value.stride(0) * size,
        slots.data_ptr(),
        cache.data_ptr(),
    )
    return {}

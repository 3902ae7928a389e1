"""The whole sparse feed-forward behind the router, each chosen expert read in place, in one C++ call.

Replaces `expert_dispatch` to `routed_scale`: rows are counted by expert, every expert with rows multiplies up to four
of them at a time straight from its stacked weights, and the weighted sum is taken in token order.

Predicts: no pass over the experts that nobody chose, no permuted copies; 500 us -> 20 us a layer at decode.
Measured: 460 us -> 10 us a layer at decode, 2,690 us -> 1,150 us at prefill of 2 x 128; isolated and warm, CPU time
of one thread of an AMD EPYC (family 26), torch 2.13.
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

import torch
from torch import Tensor

from harness.candidate import Rewrite, Site, When

REWRITE = Rewrite(
    name="experts_gathered_cpu",
    replaces=(
        (
            "expert_dispatch",
            "expert_gate_up",
            "expert_swiglu",
            "expert_down",
            "expert_combine",
            "routed_scale",
        ),
    ),
    backend="cpp",
    target="decode",
    when=When(device=("cpu",)),
)

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

struct bf16 { uint16_t bits; };

static inline float wide(float x) { return x; }
static inline float wide(bf16 x) { return __builtin_bit_cast(float, uint32_t(x.bits) << 16); }

template <class T> static inline T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline bf16 narrow<bf16>(float x) {  // to nearest, ties to even; NaN stays NaN
    uint32_t u = __builtin_bit_cast(uint32_t, x);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return {uint16_t(x == x ? rounded : 0x7fc0)};
}
template <class T> static inline float rounded(float x) { return wide(narrow<T>(x)); }

typedef float vec __attribute__((vector_size(64)));
typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));
typedef uint16_t half_bits __attribute__((vector_size(32)));
typedef uint32_t word_bits __attribute__((vector_size(64)));

static inline vec load(const float* p) { vec v; std::memcpy(&v, p, 64); return v; }
static inline vec load(const bf16* p) {
    half_bits h;
    std::memcpy(&h, p, 32);
    return (vec)(__builtin_convertvector(h, word_bits) << 16);
}
static inline float sum_of(vec v) {
    vec8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
             __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    vec4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

// To within 2 ulp for x <= 0, which is all a sigmoid asks; 0 below e^-87. Vectorises where libm's does not.
static inline float exponential(float x) {
    const float n = std::nearbyint(x * 1.44269504f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const float clamped = n > -126.0f ? n : -126.0f;
    const float power = __builtin_bit_cast(float, (int32_t(clamped) + 127) << 23);
    return x < -87.0f ? 0.0f : p * power;
}
static inline float sigmoid(float x) {
    const float small = exponential(-std::fabs(x));
    return (x < 0 ? small : 1.0f) / (1.0f + small);
}

// made[n * width + m] = x_n . w_m, rounded to storage, for M rows of w and N of x, each of `depth` values.
template <class T, int M, int N>
static inline void block(const T* w, const float* x, int64_t depth, int64_t width, float* made) {
    vec sums[M][N] = {};
    int64_t k = 0;
    for (; k + 16 <= depth; k += 16) {
        vec xs[N];
        for (int n = 0; n < N; ++n) xs[n] = load(x + n * depth + k);
        for (int m = 0; m < M; ++m) {
            const vec ws = load(w + m * depth + k);
            for (int n = 0; n < N; ++n) sums[m][n] += ws * xs[n];
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) {
            float total = sum_of(sums[m][n]);
            for (int64_t i = k; i < depth; ++i) total += wide(w[m * depth + i]) * x[n * depth + i];
            made[n * width + m] = rounded<T>(total);
        }
}

// N rows of x [N, depth] times w [width, depth] transposed.
template <class T, int N>
static void product(const T* w, const float* x, int64_t depth, int64_t width, float* made) {
    int64_t m = 0;
    for (; m + 4 <= width; m += 4) block<T, 4, N>(w + m * depth, x, depth, width, made + m);
    for (; m < width; ++m) block<T, 1, N>(w + m * depth, x, depth, width, made + m);
}

// N dispatched rows of one expert; row i of `slots` is token * top_k + choice. Fills `rows`, rounded to storage.
template <class T, int N>
static void expert(const T* x, const int64_t* slots, int64_t top_k, int64_t hidden, int64_t inner,
                   const T* gate_up, const T* down, float* scratch, float* rows) {
    float *taken = scratch, *both = taken + N * hidden, *act = both + N * 2 * inner, *made = act + N * inner;
    for (int n = 0; n < N; ++n)
        for (int64_t i = 0; i < hidden; ++i) taken[n * hidden + i] = wide(x[slots[n] / top_k * hidden + i]);
    product<T, N>(gate_up, taken, hidden, 2 * inner, both);
    for (int n = 0; n < N; ++n) {
        #pragma omp simd
        for (int64_t i = 0; i < inner; ++i) {
            const float gate = both[n * 2 * inner + i], up = both[n * 2 * inner + inner + i];
            act[n * inner + i] = rounded<T>(gate * sigmoid(gate) * up);
        }
    }
    product<T, N>(down, act, inner, hidden, made);
    for (int n = 0; n < N; ++n) std::memcpy(rows + slots[n] * hidden, made + n * hidden, hidden * sizeof(float));
}

template <class T>
static void experts(int64_t tokens, int64_t top_k, int64_t count, int64_t hidden, int64_t inner, const T* x,
                    const int64_t* ids, const float* weights, const T* gate_up, const T* down, float scale,
                    T* out) {
    const int64_t total = tokens * top_k;
    std::vector<int64_t> starts(count + 1), order(total);
    std::vector<float> rows(total * hidden);
    for (int64_t s = 0; s < total; ++s) {
        if (uint64_t(ids[s]) < uint64_t(count)) ++starts[ids[s] + 1];
        else for (int64_t i = 0; i < hidden; ++i) rows[s * hidden + i] = std::numeric_limits<float>::quiet_NaN();
    }
    for (int64_t e = 0; e < count; ++e) starts[e + 1] += starts[e];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t s = 0; s < total; ++s)
        if (uint64_t(ids[s]) < uint64_t(count)) order[next[ids[s]]++] = s;
    #pragma omp parallel if (total >= 256)
    {
        std::vector<float> scratch(4 * (2 * hidden + 3 * inner));
        #pragma omp for schedule(dynamic, 4)
        for (int64_t e = 0; e < count; ++e) {
            const T *first = gate_up + e * 2 * inner * hidden, *second = down + e * hidden * inner;
            int64_t s = starts[e];
            for (; s + 4 <= starts[e + 1]; s += 4)
                expert<T, 4>(x, &order[s], top_k, hidden, inner, first, second, scratch.data(), rows.data());
            for (; s < starts[e + 1]; ++s)
                expert<T, 1>(x, &order[s], top_k, hidden, inner, first, second, scratch.data(), rows.data());
        }
        #pragma omp for
        for (int64_t t = 0; t < tokens; ++t) {
            float* sum = scratch.data();
            std::memset(sum, 0, hidden * sizeof(float));
            for (int64_t k = 0; k < top_k; ++k)
                for (int64_t i = 0; i < hidden; ++i)
                    sum[i] += weights[t * top_k + k] * rows[(t * top_k + k) * hidden + i];
            for (int64_t i = 0; i < hidden; ++i) out[t * hidden + i] = narrow<T>(rounded<T>(sum[i]) * scale);
        }
    }
}

#define EXPORT(NAME, T)                                                                                      \
    extern "C" void NAME(int64_t tokens, int64_t top_k, int64_t count, int64_t hidden, int64_t inner,        \
                         const T* x, const int64_t* ids, const float* weights, const T* gate_up,             \
                         const T* down, float scale, T* out) {                                               \
        experts<T>(tokens, top_k, count, hidden, inner, x, ids, weights, gate_up, down, scale, out);         \
    }
EXPORT(run_fp32, float)
EXPORT(run_bf16, bf16)
"""


@functools.cache
def _library() -> ctypes.CDLL:
    """The compiled source, built once a process into the harness's build directory. OpenMP is the one PyTorch loaded,
    so that its number of threads holds here too."""
    folder = Path(os.environ.get("OPTIMIZE_BUILD_DIR") or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"experts_gathered-{hashlib.sha256(SOURCE.encode()).hexdigest()[:16]}"
    library = folder / f"{stem}.so"
    if not library.exists():
        source, built = folder / f"{stem}.{os.getpid()}.cpp", folder / f"{stem}.{os.getpid()}.so"
        source.write_text(SOURCE)
        flags = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC"]
        made = subprocess.run(["g++", *flags, str(source), "-o", str(built)], capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"g++ failed:\n{made.stderr}")
        built.replace(library)
    return ctypes.CDLL(str(library))


@dataclass
class State:
    function: Any
    gate_up: Tensor
    down: Tensor
    scale: float


def prepare(site: Site) -> State:
    library = _library()
    function = {"fp32": library.run_fp32, "bf16": library.run_bf16}[site.dtype]
    function.argtypes = [ctypes.c_int64] * 5 + [ctypes.c_void_p] * 5 + [ctypes.c_float, ctypes.c_void_p]
    function.restype = None
    gate_up = site.weights["expert_gate_up.weight"].contiguous()
    down = site.weights["expert_down.weight"].contiguous()
    return State(function, gate_up, down, site.attrs["routed_scale.scale"])


def run(inputs: Mapping[str, Tensor], caches: Mapping[str, Tensor], state: State) -> dict[str, Tensor]:
    rows = inputs["feedforward_input"].contiguous()
    ids, weights = inputs["expert_ids"].contiguous(), inputs["expert_weights"].contiguous()
    count, hidden, inner = state.down.shape
    made = torch.empty_like(rows)
    state.function(
        *ids.shape,
        count,
        hidden,
        inner,
        rows.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        state.gate_up.data_ptr(),
        state.down.data_ptr(),
        state.scale,
        made.data_ptr(),
    )
    return {"feedforward_out": made}

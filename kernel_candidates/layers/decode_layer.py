"""A sparse layer of a one-token step as two runs of ten kernels in all, each launched before the one before it ends.

The first run goes from the attention's output through both norms to the choice of experts; the second from the experts
through the next layer's attention to its output projection. Launches are dependent ones: a kernel's blocks come up and
read what never changes (norm weights) while its predecessor drains, and wait before they touch what it wrote. The
attention kernel norms and turns query and key itself and writes the cache, so that no kernel stands between the
projections and it: the chunk that holds the newest key puts it in place of the stale slot it loaded.

Predicts: ten launches in place of eleven, and 0.5-1 us less between each two: 0.3-0.4 ms of a 52-layer step of 2.9 ms.
"""

from math import sqrt

import torch
import triton
import triton.language as tl

from harness.candidate import Rewrite, Site, When

CHOICE = ("post_attention_norm", "attention_residual_add", "pre_feedforward_norm", "router")
EXPERTS = ("expert_dispatch", "expert_gate_up", "expert_swiglu", "expert_down", "expert_combine", "routed_scale")
INTO_NEXT = ("post_feedforward_norm", "feedforward_residual_add", "next.input_norm")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "output_gate_proj")
BEFORE = (*EXPERTS, *INTO_NEXT, *(f"next.{name}" for name in PROJECTIONS), "next.qk_norm")
AFTER = ("next.kv_cache_update", "next.attention", "next.output_gate", "next.o_proj")
REWRITE = Rewrite(
    name="decode_layer",
    replaces=(CHOICE, (*BEFORE, "next.rope", *AFTER), (*BEFORE, "next.ssmax", *AFTER)),
    backend="triton",
    target="decode",
    when=When(tokens=(1, 1), dtype=("bf16",), phases=("decode",)),
    kernels=("two_norms_kernel",),
)
TILE = 64


@triton.jit
def two_norms_kernel(
    branch, stream, first_weight, second_weight, total, normed, branch_scale, stream_scale, first_eps, second_eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    w1 = tl.load(first_weight + column, inside, other=0.0).to(tl.float32)
    w2 = tl.load(second_weight + column, inside, other=0.0).to(tl.float32)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    x = tl.load(branch + column, inside, other=0.0)
    r = tl.load(stream + column, inside, other=0.0).to(tl.float32)
    storage = x.dtype
    x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + first_eps) * w1
    x = (x.to(storage).to(tl.float32) * branch_scale).to(storage).to(tl.float32)
    h = (x + (r * stream_scale).to(storage).to(tl.float32)).to(storage)
    y = h.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / WIDTH + second_eps) * w2
    if WAITS:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(total + column, h, inside)
    tl.store(normed + column, y.to(storage), inside)


@triton.jit
def row_product(x, weight, n, real, WIDTH: tl.constexpr, N_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr):
    """[N_BLOCK] FP32: rows `n` of a weight times one row of activations."""
    column = tl.arange(0, K_BLOCK)
    total = tl.zeros((N_BLOCK, K_BLOCK), tl.float32)
    at = weight + n[:, None].to(tl.int64) * WIDTH
    for start in tl.static_range(0, WIDTH, K_BLOCK):
        k = start + column
        inside = k < WIDTH
        w = tl.load(at + k[None, :], real[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += w * tl.load(x + k, inside, other=0.0).to(tl.float32)[None, :]
    return tl.sum(total, 1)


@triton.jit
def product_kernel(
    x, weight, out, rows, WIDTH: tl.constexpr, N_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, WAITS: tl.constexpr
):
    n = tl.program_id(0) * N_BLOCK + tl.arange(0, N_BLOCK)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    made = row_product(x, weight, n, n < rows, WIDTH, N_BLOCK, K_BLOCK)
    if WAITS:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + n, made.to(out.dtype.element_ty), n < rows)


@triton.jit
def projections_kernel(
    x, q_weight, k_weight, v_weight, g_weight, out,
    WIDTH: tl.constexpr, Q_ROWS: tl.constexpr, KV_ROWS: tl.constexpr, N_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Query, key, value and gate rows, one after the other in `out`; N_BLOCK divides each."""
    first = tl.program_id(0) * N_BLOCK
    weight = q_weight
    start = tl.where(first >= Q_ROWS, Q_ROWS, 0)
    if first >= Q_ROWS:
        weight = k_weight
    if first >= Q_ROWS + KV_ROWS:
        weight = v_weight
    if first >= Q_ROWS + 2 * KV_ROWS:
        weight = g_weight
    start += tl.where(first >= Q_ROWS + KV_ROWS, KV_ROWS, 0) + tl.where(first >= Q_ROWS + 2 * KV_ROWS, KV_ROWS, 0)
    n = first - start + tl.arange(0, N_BLOCK)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    made = row_product(x, weight, n, n >= 0, WIDTH, N_BLOCK, K_BLOCK)
    if WAITS:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + first + tl.arange(0, N_BLOCK), made.to(out.dtype.element_ty))


@triton.jit
def choice_kernel(
    logits, bias, ids, weights,
    GROUPS: tl.constexpr, MEMBERS: tl.constexpr, G_BLOCK: tl.constexpr, M_BLOCK: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, K_BLOCK: tl.constexpr,
    NORMALISES: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    LOWEST: tl.constexpr = float("-inf")
    group = tl.arange(0, G_BLOCK)
    member = tl.arange(0, M_BLOCK)
    expert = group[:, None] * MEMBERS + member[None, :]
    real = (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
    shift = tl.load(bias + expert, real, other=0.0)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    score = tl.div_rn(1.0, 1.0 + tl.exp(-tl.load(logits + expert, real, other=0.0)))
    choice = tl.where(real, score + shift, LOWEST)
    best, best_at = tl.max(choice, 1), tl.argmax(choice, 1)
    second = tl.max(tl.where(member[None, :] == best_at[:, None], LOWEST, choice), 1)
    group_score = tl.where(group < GROUPS, best + second, LOWEST)
    stays = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        stays = stays | (group == tl.argmax(tl.where(stays, LOWEST, group_score), 0))
    choice = tl.reshape(tl.where(stays[:, None], choice, LOWEST), (G_BLOCK * M_BLOCK,))
    score = tl.reshape(score, (G_BLOCK * M_BLOCK,))
    place = tl.arange(0, G_BLOCK * M_BLOCK)
    rank = tl.arange(0, K_BLOCK)
    picked_ids = tl.zeros((K_BLOCK,), tl.int32)
    picked = tl.zeros((K_BLOCK,), tl.float32)
    for turn in tl.static_range(TOP_K):
        chosen = tl.argmax(choice, 0)
        here = place == chosen
        picked_ids = tl.where(rank == turn, chosen // M_BLOCK * MEMBERS + chosen % M_BLOCK, picked_ids)
        picked = tl.where(rank == turn, tl.sum(tl.where(here, score, 0.0), 0), picked)
        choice = tl.where(here, LOWEST, choice)
    if NORMALISES:
        picked = tl.div_rn(picked, tl.zeros((K_BLOCK,), tl.float32) + (tl.sum(picked, 0) + 1e-20))
    if WAITS:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(ids + rank, picked_ids.to(tl.int64), rank < TOP_K)
    tl.store(weights + rank, picked, rank < TOP_K)


@triton.jit
def experts_up_kernel(
    x, weight, ids, act, expert_stride,
    WIDTH: tl.constexpr, INNER: tl.constexpr, N_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    choice = tl.program_id(0)
    n = tl.program_id(1) * N_BLOCK + tl.arange(0, N_BLOCK)
    column = tl.arange(0, K_BLOCK)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    gate_weight = weight + tl.load(ids + choice).to(tl.int64) * expert_stride + n[:, None] * WIDTH
    gate = tl.zeros((N_BLOCK, K_BLOCK), tl.float32)
    up = tl.zeros((N_BLOCK, K_BLOCK), tl.float32)
    for start in tl.static_range(0, WIDTH, K_BLOCK):
        k = start + column
        inside = k < WIDTH
        mask = (n < INNER)[:, None] & inside[None, :]
        value = tl.load(x + k, inside, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(gate_weight + k[None, :], mask, other=0.0).to(tl.float32) * value
        up += tl.load(gate_weight + INNER * WIDTH + k[None, :], mask, other=0.0).to(tl.float32) * value
    if WAITS:
        tl.extra.cuda.gdc_launch_dependents()
    storage = act.dtype.element_ty
    g = tl.sum(gate, 1).to(storage).to(tl.float32)
    u = tl.sum(up, 1).to(storage).to(tl.float32)
    tl.store(act + choice * INNER + n, (g / (1.0 + tl.exp(-g)) * u).to(storage), n < INNER)


@triton.jit
def experts_down_kernel(
    act, weight, ids, expert_weights, out, expert_stride, scale,
    WIDTH: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, N_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * N_BLOCK + tl.arange(0, N_BLOCK)
    storage = out.dtype.element_ty
    if WAITS:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((N_BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        own = weight + tl.load(ids + choice).to(tl.int64) * expert_stride
        made = row_product(act + choice * INNER, own, n, n < WIDTH, INNER, N_BLOCK, K_BLOCK)
        total += made.to(storage).to(tl.float32) * tl.load(expert_weights + choice)
    if WAITS:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + n, (total.to(storage).to(tl.float32) * scale).to(storage), n < WIDTH)


@triton.jit
def turned(x, weight, eps, d, real, cos, sin, scale, DIM: tl.constexpr, ROTATES: tl.constexpr, SCALES: tl.constexpr):
    """[heads, D] in storage: heads at pointers `x` [heads, 1] normed, then rotated (FP32 tables) or scaled."""
    partner = (d + DIM // 2) % DIM
    head = tl.load(x + d[None, :], real, other=0.0)
    storage = head.dtype
    head = head.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(head * head, 1) / DIM + eps)[:, None]
    head = (head * inverse * tl.load(weight + d).to(tl.float32)[None, :]).to(storage).to(tl.float32)
    if ROTATES:
        other = tl.load(x + partner[None, :], real, other=0.0).to(tl.float32)
        other = (other * inverse * tl.load(weight + partner).to(tl.float32)[None, :]).to(storage).to(tl.float32)
        sign = tl.where(d < DIM // 2, -1.0, 1.0)
        head = head * tl.load(cos + d)[None, :] + other * (sign * tl.load(sin + d))[None, :]
    elif SCALES:
        head = head * tl.load(scale)
    return head.to(storage)


@triton.jit
def chunk_kernel(
    projected, q_weight, k_weight, cos, sin, query_scale, slots, cache, lengths, table, partial, peaks, sums,
    block_stride, head_stride, slot_stride, eps, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, R_BLOCK: tl.constexpr, ROTATES: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Attention of the token's heads over one chunk of its keys; DIM is a power of two. The newest key and value come
    from the projections, and the program whose chunk holds them writes them to the cache."""
    kv_head = tl.program_id(0)
    chunk = tl.program_id(1)
    row = tl.arange(0, R_BLOCK)
    one = tl.arange(0, 1)
    d = tl.arange(0, DIM)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    length = tl.load(lengths)
    slot = tl.load(slots)
    begin = chunk * CHUNK
    if WINDOW > 0:
        begin += tl.maximum(length - WINDOW, 0)
    end = tl.minimum(begin + CHUNK, length)
    real = (row < GROUP)[:, None] & (d < DIM)[None, :]
    at_query = projected + (kv_head * GROUP + row)[:, None] * DIM
    q = turned(at_query, q_weight, eps, d, real, cos, sin, query_scale, DIM, ROTATES, True)
    at_key = projected + (KV_HEADS * GROUP + kv_head) * DIM
    whole = (one == 0)[:, None] & (d < DIM)[None, :]
    new_key = turned(at_key + one[:, None], k_weight, eps, d, whole, cos, sin, query_scale, DIM, ROTATES, False)
    new_value = tl.load(at_key + KV_HEADS * DIM + one[:, None] + d[None, :])
    newest = tl.where(slot >= 0, length - 1, -1)
    if (newest >= begin) & (newest < end):
        to = cache + slot // PAGE * block_stride + kv_head * head_stride + slot % PAGE * slot_stride
        tl.store(to + one[:, None] + d[None, :], new_key)
        tl.store(to + DIM + one[:, None] + d[None, :], new_value)

    peak = tl.full((R_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((R_BLOCK,), tl.float32)
    made = tl.zeros((R_BLOCK, DIM), tl.float32)
    for start in range(begin, end, TILE):
        n = start + tl.arange(0, TILE)
        old = (n < end) & (n != newest)
        page = tl.load(table + n // PAGE, old, other=0).to(tl.int64)
        at = cache + page * block_stride + kv_head * head_stride + (n % PAGE) * slot_stride
        k = tl.load(at[:, None] + d[None, :], old[:, None] & (d < DIM)[None, :], other=0.0)
        v = tl.load(at[:, None] + DIM + d[None, :], old[:, None] & (d < DIM)[None, :], other=0.0)
        k = tl.where((n == newest)[:, None], new_key, k)
        v = tl.where((n == newest)[:, None], new_value, v)
        score = tl.where((n < end)[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp(score - new_peak[:, None])
        fade = tl.exp(peak - new_peak)
        high = p.to(v.dtype)
        total = total * fade + tl.sum(p, 1)
        made = tl.dot(high, v, made * fade[:, None])
        made = tl.dot((p - high.to(tl.float32)).to(v.dtype), v, made)
        peak = new_peak
    if WAITS:
        tl.extra.cuda.gdc_launch_dependents()
    place = (kv_head * CHUNKS + chunk) * GROUP + row
    tl.store(peaks + place, peak, row < GROUP)
    tl.store(sums + place, total, row < GROUP)
    tl.store(partial + place[:, None] * DIM + d[None, :], made, real)


@triton.jit
def join_kernel(
    partial, peaks, sums, gate, bias, out,
    GROUP: tl.constexpr, DIM: tl.constexpr, CHUNKS: tl.constexpr, C_BLOCK: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    chunk = tl.arange(0, C_BLOCK)
    d = tl.arange(0, DIM)
    storage = out.dtype.element_ty
    shift = tl.load(bias + head).to(storage).to(tl.float32)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    place = (head // GROUP * CHUNKS + chunk) * GROUP + head % GROUP
    peak = tl.load(peaks + place, chunk < CHUNKS, other=float("-inf"))
    highest = tl.max(peak, 0)
    fade = tl.exp(peak - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(tl.load(sums + place, chunk < CHUNKS, other=0.0) * fade, 0)
    seen = (peak > float("-inf"))[:, None] & (d < DIM)[None, :]
    part = tl.load(partial + place[:, None] * DIM + d[None, :], seen, other=0.0)
    made = (tl.sum(part * fade[:, None], 0) / tl.where(total > 0.0, total, 1.0)).to(storage).to(tl.float32)
    g = (tl.load(gate + head * DIM + d).to(tl.float32) + shift).to(storage).to(tl.float32)
    if WAITS:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + head * DIM + d, (made * (1.0 / (1.0 + tl.exp(-g))).to(storage).to(tl.float32)).to(storage))


class Launcher:
    """Launches with the site's options: dependent ones on a GPU."""

    def __init__(self, site: Site) -> None:
        self.waits = site.device == "cuda"
        self.weights, self.attrs = site.weights, site.attrs

    def __call__(self, kernel, grid, *args, warps: int = 4, **sizes) -> None:
        options = {"launch_pdl": True} if self.waits else {}
        kernel[grid](*args, **sizes, WAITS=self.waits, num_warps=warps, **options)

    def norms(self, first, add, second, branch, stream):
        """(sum, normed sum) of two rows [1, H]."""
        width, index = branch.shape[1], self.attrs[f"{add}.residual_index"]
        total, normed = torch.empty_like(stream), torch.empty_like(stream)
        block = triton.next_power_of_2(width)
        self(
            two_norms_kernel, (1,), branch, stream, self.weights[f"{first}.weight"], self.weights[f"{second}.weight"],
            total, normed, 1.0 / sqrt(index), sqrt((index - 1) / index),
            self.attrs[f"{first}.eps"], self.attrs[f"{second}.eps"],
            WIDTH=width, BLOCK=block, warps=max(1, min(16, block // 256)),
        )  # fmt: skip
        return total, normed

    def product(self, x, weight, dtype, n_block: int):
        rows, width = weight.shape
        made = torch.empty(1, rows, dtype=dtype, device=x.device)
        grid = (triton.cdiv(rows, n_block),)
        self(product_kernel, grid, x, weight, made, rows, WIDTH=width, N_BLOCK=n_block, K_BLOCK=inner_block(width, 1024))
        return made


def inner_block(width: int, most: int) -> int:
    """The largest power of two up to `most` that divides `width`; where only a small one does, one that covers it."""
    divides = width & -width
    return min(most, divides) if divides >= 32 else min(most, triton.next_power_of_2(width))


def prepare(site: Site):
    return Launcher(site), site.run[0] == "post_attention_norm", "next.rope" in site.run


def run(inputs, caches, state):
    launch, chooses, rotates = state
    return choose(inputs, launch) if chooses else carry_on(inputs, caches, launch, rotates)


def choose(inputs, launch):
    residual, normed = launch.norms(*CHOICE[:3], inputs["attention_out"], inputs["hidden"])
    groups, top_k = launch.attrs["router.num_groups"], launch.attrs["router.top_k"]
    logits = launch.product(normed, launch.weights["router.weight"], torch.float32, 2)
    ids = torch.empty(1, top_k, dtype=torch.int64, device=normed.device)
    weights = torch.empty(1, top_k, dtype=torch.float32, device=normed.device)
    members = logits.shape[1] // groups
    launch(
        choice_kernel, (1,), logits, launch.weights["router.correction_bias"], ids, weights,
        GROUPS=groups, MEMBERS=members,
        G_BLOCK=triton.next_power_of_2(groups), M_BLOCK=triton.next_power_of_2(members), TOP_GROUPS=launch.attrs["router.topk_groups"], TOP_K=top_k,
        K_BLOCK=triton.next_power_of_2(top_k), NORMALISES=launch.attrs["router.norm_topk_prob"], warps=1,
    )  # fmt: skip
    return {"residual": residual, "feedforward_input": normed, "expert_ids": ids, "expert_weights": weights}


def experts(x, ids, weights, launch):
    gate_up, down = launch.weights["expert_gate_up.weight"], launch.weights["expert_down.weight"]
    width, inner = down.shape[1:]
    top_k = ids.shape[1]
    act, out = x.new_empty(top_k, inner), torch.empty_like(x)
    launch(
        experts_up_kernel, (top_k, triton.cdiv(inner, 4)), x, gate_up, ids, act, gate_up.stride(0),
        WIDTH=width, INNER=inner, N_BLOCK=4, K_BLOCK=inner_block(width, 512),
    )  # fmt: skip
    launch(
        experts_down_kernel, (triton.cdiv(width, 16),), act, down, ids, weights, out, down.stride(0),
        launch.attrs["routed_scale.scale"], WIDTH=width, INNER=inner, TOP_K=top_k, N_BLOCK=16,
        K_BLOCK=inner_block(inner, 128),
    )  # fmt: skip
    return out


def carry_on(inputs, caches, launch, rotates):
    x = experts(inputs["feedforward_input"], inputs["expert_ids"], inputs["expert_weights"], launch)
    hidden, normed = launch.norms(*INTO_NEXT, x, inputs["residual"])
    parts = [launch.weights[f"next.{name}.weight"] for name in PROJECTIONS]
    q_rows, kv_rows, width = parts[0].shape[0], parts[1].shape[0], parts[0].shape[1]
    projected = normed.new_empty(2 * (q_rows + kv_rows))
    launch(
        projections_kernel, (projected.shape[0] // 4,), normed, *parts, projected,
        WIDTH=width, Q_ROWS=q_rows, KV_ROWS=kv_rows, N_BLOCK=4, K_BLOCK=inner_block(width, 1024),
    )  # fmt: skip
    gated = attend(projected, q_rows, kv_rows, inputs, caches["next.kv_cache"], launch, rotates)
    weight = launch.weights["next.o_proj.weight"]
    made = launch.product(gated, weight, gated.dtype, 16)
    return {"next.hidden": hidden, "next.attention_out": made}


def attend(projected, q_rows, kv_rows, inputs, cache, launch, rotates):
    """[1, q_rows] gated attention of the projected token, its key and value written to the cache."""
    weights, attrs = launch.weights, launch.attrs
    dim, window, page = attrs["next.qk_norm.head_dim"], attrs["next.attention.window"], cache.shape[2]
    heads, kv_heads, device = q_rows // dim, kv_rows // dim, projected.device
    keys = inputs["block_table"].shape[1] * page
    keys = min(keys, window) if window else keys
    chunk = TILE
    while triton.cdiv(keys, chunk) > 64:
        chunk *= 2
    chunks = triton.cdiv(keys, chunk)
    partial = torch.empty(heads * chunks, dim, dtype=torch.float32, device=device)
    peaks, sums = torch.empty(2, heads * chunks, dtype=torch.float32, device=device)
    table = inputs["cos"] if rotates else inputs["query_scale"]
    group = heads // kv_heads
    launch(
        chunk_kernel, (kv_heads, chunks), projected, weights["next.qk_norm.q_weight"], weights["next.qk_norm.k_weight"],
        table, inputs["sin"] if rotates else table, table, inputs["slot_mapping"], cache, inputs["seq_lens"],
        inputs["block_table"], partial, peaks, sums, *cache.stride()[:3], attrs["next.qk_norm.eps"],
        attrs["next.attention.scale"],
        GROUP=group, KV_HEADS=kv_heads, DIM=dim, PAGE=page, WINDOW=window, CHUNKS=chunks, CHUNK=chunk, TILE=TILE,
        R_BLOCK=max(16, triton.next_power_of_2(group)), ROTATES=rotates,
    )  # fmt: skip
    gated = projected.new_empty(1, q_rows)
    launch(
        join_kernel, (heads,), partial, peaks, sums, projected[q_rows + 2 * kv_rows :],
        weights["next.output_gate.bias"], gated,
        GROUP=group, DIM=dim, CHUNKS=chunks, C_BLOCK=triton.next_power_of_2(chunks),
    )  # fmt: skip
    return gated

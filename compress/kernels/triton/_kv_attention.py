"""The kernel of compress/kernels/triton/kv_attention.py; imported when it is first launched, because it needs triton.

A program takes one KV head of one sequence and a part of its tokens; those that end last add the parts up. Keys and
values are the left operands of all products, S^T = K q^T and out^T = V^T P^T, so that words go from shared memory to
registers, are taken apart there (compress/kernels/triton/unpack.py) and feed the tensor cores without a way back.

The words of TOKENS consecutive tokens are one row of the matrices: products need 16 columns, and a token may have fewer
words in a field. Each of the TOKENS then has its own columns of queries, with zeros where the words are another's, and
is a stream of its own: a maximum, a sum and a result, as if it were another part. Columns are [TOKENS, ROWS].

A piece of a token is WORDS words of one field, that is so many neighbouring channels with the same scale by token.

`side` is (words a, b, c, scales, minima, levels): see `_factors` for the kinds. USE_ASM is off in the interpreter.
"""

# ruff: noqa: PLR0913, PLR0917, ANN001, ANN202 (signatures of kernels)
# mypy: ignore-errors

import triton
import triton.language as tl

from compress.kernels.triton._int import _field, _plain
from compress.kernels.triton._parts import COMPILED, powers  # noqa: F401
from compress.kernels.triton.unpack import fields

LOWEST = tl.constexpr(-1e30)  # score of a token that is masked: finite, so that differences are numbers
STATS = tl.constexpr(32)  # parts whose maxima are read at a time


@triton.jit
def _affine(code, scale, low, USE_ASM: tl.constexpr):
    """float16 code * scale + low, rounded once."""
    if USE_ASM:
        text: tl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(text, "=r,r,r,r", (code, scale, low), tl.float16, is_pure=True, pack=2)
    else:
        return (code.to(tl.float32) * scale.to(tl.float32) + low.to(tl.float32)).to(tl.float16)


@triton.jit
def _value(held, factors, levels, BITS: tl.constexpr, FIELD: tl.constexpr, KIND: tl.constexpr,
           USE_ASM: tl.constexpr):  # fmt: skip
    """Keys or values of a field, float16; without their norms if KIND is "norm"."""
    a, b, c = held
    if KIND == "norm":
        return tl.load(levels + _plain(a, b, c, BITS, FIELD)).to(tl.float16)
    else:
        scale, low = factors
        if USE_ASM:
            return _affine(_field(a, b, c, BITS, FIELD, 0, False), scale, low, USE_ASM)
        else:
            return _affine(_plain(a, b, c, BITS, FIELD), scale, low, USE_ASM)


@triton.jit
def _held(side, token, word, coded, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """The words of some tokens, int16, of all planes."""
    a, b, c, scales, minima, levels = side
    at, mask = token * (WIDTH // fields(BITS)) + word, token < coded
    first = tl.load(a + at, mask=mask, other=0, eviction_policy="evict_first")
    if BITS == 3:
        second = tl.load(b + at, mask=mask, other=0, eviction_policy="evict_first")
        return first, second, tl.load(c + at, mask=mask, other=0, eviction_policy="evict_first")
    else:
        return first, first, first


@triton.jit
def _factors(side, first, r, column, coded, CHANNEL: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
             WIDTH: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Scale and minimum of the piece from CHANNEL on, float16 that broadcast to [r, column].

    "channel": of GROUP tokens, for each channel; "token": of GROUP channels, for each token; "norm": none here.
    """
    a, b, c, scales, minima, levels = side
    if KIND == "norm":
        return first, first
    elif KIND == "channel":
        j = CHANNEL + column % WORDS
        if GROUP % BLOCK == 0:
            at = first // GROUP * WIDTH + j[None, :]
            return tl.load(scales + at), tl.load(minima + at)
        else:
            token = tl.minimum(first + r[:, None] * TOKENS + (column // WORDS)[None, :], coded - 1)
            at = token // GROUP * WIDTH + j[None, :]
            return tl.load(scales + at), tl.load(minima + at)
    else:
        token = first + r[:, None] * TOKENS
        if TOKENS > 1:
            token = token + (column // WORDS)[None, :]
        at, known = token * (WIDTH // GROUP) + CHANNEL // GROUP, token < coded
        return tl.load(scales + at, mask=known, other=0.0), tl.load(minima + at, mask=known, other=0.0)


@triton.jit
def _norms(side, token, coded):
    """Norms of tokens, float32."""
    a, b, c, scales, minima, levels = side
    return tl.load(scales + token, mask=token < coded, other=0.0).to(tl.float32)


@triton.jit
def _queries(q, up, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr,
             ROWS: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """A tuple of q^T [TOKENS * WORDS, TOKENS * ROWS] float16, one for each piece in the order of `_scores`."""
    F: tl.constexpr = fields(BITS)
    k, m = tl.arange(0, TOKENS * WORDS)[:, None], tl.arange(0, TOKENS * ROWS)[None, :]
    mask = (m % ROWS < GROUPS) & (k // WORDS == m // ROWS)
    found = ()
    for skipped in tl.static_range(0, WIDTH // F, WORDS):
        for f in tl.static_range(F):
            at = m % ROWS * WIDTH + f * (WIDTH // F) + skipped + k % WORDS
            value = tl.load(q + at, mask=mask, other=0.0).to(tl.float32)
            found = found + ((value * up[None, :]).to(tl.float16),)
    return found


@triton.jit
def _scores(side, queries, first, coded, BITS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
            WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
            BLOCK: tl.constexpr, USE_ASM: tl.constexpr):  # fmt: skip
    """Products [r, TOKENS * ROWS] float32 of coded keys with the queries."""
    F: tl.constexpr = fields(BITS)
    r, column = tl.arange(0, BLOCK // TOKENS), tl.arange(0, TOKENS * WORDS)
    token = first + r[:, None] * TOKENS + (column // WORDS)[None, :]
    total = tl.zeros((BLOCK // TOKENS, TOKENS * ROWS), tl.float32)
    for skipped in tl.static_range(0, WIDTH // F, WORDS):
        held = _held(side, token, skipped + (column % WORDS)[None, :], coded, BITS, WIDTH)
        for f in tl.static_range(F):
            factors = _factors(side, first, r, column, coded, f * (WIDTH // F) + skipped, KIND, GROUP, WIDTH, TOKENS,
                               WORDS, BLOCK)  # fmt: skip
            value = _value(held, factors, side[5], BITS, f, KIND, USE_ASM)
            total = tl.dot(value, queries[skipped // WORDS * F + f], total)
    return total


@triton.jit
def _mixed(acc, side, p, first, coded, BITS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
           WIDTH: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
           USE_ASM: tl.constexpr):  # fmt: skip
    """acc + values^T p, a tuple of [TOKENS * WORDS, TOKENS * ROWS] float32, one for each piece."""
    F: tl.constexpr = fields(BITS)
    r, column = tl.arange(0, BLOCK // TOKENS), tl.arange(0, TOKENS * WORDS)
    token = first + r[:, None] * TOKENS + (column // WORDS)[None, :]
    new = ()
    for skipped in tl.static_range(0, WIDTH // F, WORDS):
        a, b, c = _held(side, token, skipped + (column % WORDS)[None, :], coded, BITS, WIDTH)
        held = tl.trans(a), tl.trans(b), tl.trans(c)
        for f in tl.static_range(F):
            scale, low = _factors(side, first, r, column, coded, f * (WIDTH // F) + skipped, KIND, GROUP, WIDTH,
                                  TOKENS, WORDS, BLOCK)  # fmt: skip
            if KIND != "norm":
                scale, low = tl.trans(scale), tl.trans(low)
            value = _value(held, (scale, low), side[5], BITS, f, KIND, USE_ASM)
            new = new + (tl.dot(value, p, acc[skipped // WORDS * F + f]),)
    return new


@triton.jit
def _softmax(s, keep, top, total):
    """Scores in units of log2 -> (p, what earlier results are to be multiplied by, maxima, sums), by column."""
    s = tl.where(keep, s, LOWEST)
    highest = tl.maximum(top, tl.max(s, 0))
    p, ratio = tl.exp2(s - highest[None, :]), tl.exp2(top - highest)
    return p, ratio, highest, total * ratio + tl.sum(p, 0)


@triton.jit
def _keep(mask, token, end, place, MASKED: tl.constexpr):
    """Whether tokens below `end` are seen; `place` is that of token 0 in storage order."""
    if MASKED:
        return tl.load(mask + place + token, mask=token < end, other=0) != 0
    else:
        return token < end


@triton.jit
def _coded(q, bias, mask, keys, values, results, stats, part, begin, end, coded, sinks, scale,
           K_BITS: tl.constexpr, K_KIND: tl.constexpr, K_GROUP: tl.constexpr, K_WIDTH: tl.constexpr,
           K_WORDS: tl.constexpr, V_BITS: tl.constexpr, V_KIND: tl.constexpr, V_GROUP: tl.constexpr,
           V_WIDTH: tl.constexpr, V_WORDS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
           TOKENS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr,
           USE_ASM: tl.constexpr):  # fmt: skip
    """The coded tokens from step `begin` to `end`, BLOCK in a step; results in the places part * TOKENS and on."""
    COLUMNS: tl.constexpr = TOKENS * ROWS
    F: tl.constexpr = fields(V_BITS)
    r, m = tl.arange(0, BLOCK // TOKENS), tl.arange(0, COLUMNS)
    at = m[None, :] % ROWS * K_WIDTH + tl.arange(0, K_WIDTH)[:, None]
    whole = tl.load(q + at, mask=m[None, :] % ROWS < GROUPS, other=0.0).to(tl.float32)
    up, down = powers(tl.max(tl.abs(whole), 0))
    queries = _queries(q, up, GROUPS, K_WIDTH, K_BITS, TOKENS, ROWS, K_WORDS)
    factor = down * scale
    added = tl.load(bias + m % ROWS, mask=m % ROWS < GROUPS, other=0.0) * scale if BIASED else factor
    acc = ()
    for _ in tl.static_range(V_WIDTH // V_WORDS):
        acc = acc + (tl.zeros((TOKENS * V_WORDS, COLUMNS), tl.float32),)
    top, total = tl.full((COLUMNS,), LOWEST, tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for step in range(begin, end):
        first = step * BLOCK
        token = first + r[:, None] * TOKENS + (m // ROWS)[None, :]
        s = _scores(keys, queries, first, coded, K_BITS, K_KIND, K_GROUP, K_WIDTH, TOKENS, ROWS, K_WORDS, BLOCK,
                    USE_ASM)  # fmt: skip
        s *= factor[None, :]
        if K_KIND == "norm":
            s *= _norms(keys, token, coded)
        if BIASED:
            s += added[None, :]
        p, ratio, top, total = _softmax(s, _keep(mask, token, coded, sinks, MASKED), top, total)
        if V_KIND == "norm":
            p *= _norms(values, token, coded)
        scaled = ()
        for i in tl.static_range(V_WIDTH // V_WORDS):
            scaled = scaled + (acc[i] * ratio[None, :],)
        acc = _mixed(scaled, values, p.to(tl.float16), first, coded, V_BITS, V_KIND, V_GROUP, V_WIDTH, TOKENS,
                     V_WORDS, BLOCK, USE_ASM)  # fmt: skip
    place = (part * TOKENS + m // ROWS) * GROUPS + m % ROWS
    known, j = m % ROWS < GROUPS, tl.arange(0, TOKENS * V_WORDS)[:, None]
    own = known[None, :] & (j // V_WORDS == m[None, :] // ROWS)
    for i in tl.static_range(V_WIDTH // V_WORDS):
        channel = i % F * (V_WIDTH // F) + i // F * V_WORDS + j % V_WORDS
        tl.store(results + place[None, :] * V_WIDTH + channel, acc[i], mask=own)
    tl.store(stats + place * 2, top, mask=known)
    tl.store(stats + place * 2 + 1, total, mask=known)


@triton.jit
def _segment(state, q, mask, keys, values, count, place, scale, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
             BLOCK: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The running softmax `state` with `count` exact tokens more; q [K_WIDTH, rows] float32."""
    acc, top, total = state
    t, k, v = tl.arange(0, BLOCK), tl.arange(0, K_WIDTH), tl.arange(0, V_WIDTH)
    for first in range(0, count, BLOCK):
        token = first + t
        known = (token < count)[:, None]
        key = tl.load(keys + token[:, None] * K_WIDTH + k[None, :], mask=known, other=0.0).to(tl.float32)
        s = tl.dot(key, q, input_precision=PRECISION) * scale
        keep = _keep(mask, token, count, place, MASKED)[:, None]
        p, ratio, top, total = _softmax(s, keep, top, total)
        value = tl.load(values + token[:, None] * V_WIDTH + v[None, :], mask=known, other=0.0).to(tl.float32)
        acc = tl.dot(tl.trans(value), p, acc * ratio[None, :], input_precision=PRECISION)
    return acc, top, total


@triton.jit
def _exact(q, mask, sink, tail, new, counts, results, stats, place, scale, K_WIDTH: tl.constexpr,
           V_WIDTH: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
           PRECISION: tl.constexpr):  # fmt: skip
    """All exact tokens; (keys, values) of each segment, counts (sinks, coded, tails, news); one part's results."""
    sinks, coded, tails, news = counts
    m, k, v = tl.arange(0, ROWS), tl.arange(0, K_WIDTH), tl.arange(0, V_WIDTH)
    known = m < GROUPS
    query = tl.load(q + m[None, :] * K_WIDTH + k[:, None], mask=known[None, :], other=0.0).to(tl.float32)
    state = (tl.zeros((V_WIDTH, ROWS), tl.float32), tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32))
    state = _segment(state, query, mask, sink[0], sink[1], sinks, 0, scale, K_WIDTH, V_WIDTH, 16, MASKED, PRECISION)
    state = _segment(state, query, mask, tail[0], tail[1], tails, sinks + coded, scale, K_WIDTH, V_WIDTH, 16, MASKED,
                     PRECISION)  # fmt: skip
    state = _segment(state, query, mask, new[0], new[1], news, sinks + coded + tails, scale, K_WIDTH, V_WIDTH, 16,
                     MASKED, PRECISION)  # fmt: skip
    at = place * GROUPS + m
    tl.store(results + at[None, :] * V_WIDTH + v[:, None], state[0], mask=known[None, :])
    tl.store(stats + at * 2, state[1], mask=known)
    tl.store(stats + at * 2 + 1, state[2], mask=known)


@triton.jit
def _combine(results, stats, out, exact_out, mass, places, GROUPS: tl.constexpr, ROWS: tl.constexpr,
             WIDTH: tl.constexpr, APART: tl.constexpr):  # fmt: skip
    """out [GROUPS, WIDTH] = all parts' results, weighted by their maxima and divided by the sum.

    APART: without the exact tokens', which exact_out gets; mass [GROUPS] is the weight of the coded ones.
    """
    m, v, i = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, STATS)
    known = m < GROUPS
    top = tl.full((ROWS,), LOWEST, tl.float32)
    for start in range(0, places, STATS):
        place = start + i
        at, mask = place[:, None] * GROUPS + m[None, :], (place < places)[:, None] & known[None, :]
        found = tl.load(stats + at * 2, mask=mask, other=LOWEST, cache_modifier=".cg")
        top = tl.maximum(top, tl.max(found, 0))
    acc, total = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS,), tl.float32)
    for place in tl.range(0, places - 1, loop_unroll_factor=4):  # loads in flight
        part, weight = _result(results, stats, place, m, v, top, GROUPS, WIDTH)
        acc, total = acc + part, total + weight
    part, weight = _result(results, stats, places - 1, m, v, top, GROUPS, WIDTH)
    whole, at = total + weight, m[:, None] * WIDTH + v[None, :]
    if APART:
        tl.store(exact_out + at, part / whole[:, None], mask=known[:, None])
        tl.store(mass + m, total / whole, mask=known)
    else:
        acc += part
    tl.store(out + at, (acc / whole[:, None]).to(out.dtype.element_ty), mask=known[:, None])


@triton.jit
def _result(results, stats, place, m, v, top, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """(result [m, v], sum [m]) of a part, for the maxima `top`."""
    at, known = place * GROUPS + m, m < GROUPS
    weight = tl.exp2(tl.load(stats + at * 2, mask=known, other=LOWEST, cache_modifier=".cg") - top)
    total = tl.load(stats + at * 2 + 1, mask=known, other=1.0, cache_modifier=".cg")
    part = tl.load(results + at[:, None] * WIDTH + v[None, :], mask=known[:, None], other=0.0, cache_modifier=".cg")
    return part * weight[:, None], total * weight


@triton.jit(do_not_specialize=["coded", "sinks", "tails", "news", "columns", "parts"])
def attend(q, coded_q, bias, out, exact_out, mass, mask, k_a, k_b, k_c, k_scales, k_minima, k_levels,
           v_a, v_b, v_c, v_scales, v_minima, v_levels,
           sink_k, sink_v, tail_k, tail_v, new_k, new_v, partials, counters,
           k_stride, k_scale_stride, v_stride, v_scale_stride, sink_k_stride, sink_v_stride, tail_k_stride,
           tail_v_stride, new_k_stride, new_v_stride, coded, sinks, tails, news, columns, heads, parts, scale,
           K_BITS: tl.constexpr, K_KIND: tl.constexpr, K_GROUP: tl.constexpr, K_WIDTH: tl.constexpr,
           K_WORDS: tl.constexpr, V_BITS: tl.constexpr, V_KIND: tl.constexpr, V_GROUP: tl.constexpr,
           V_WIDTH: tl.constexpr, V_WORDS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
           EXACT_ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
           BIASED: tl.constexpr, PRECISION: tl.constexpr, USE_ASM: tl.constexpr):  # fmt: skip
    """out [heads, GROUPS, V_WIDTH] = attention of q [heads, GROUPS, K_WIDTH]; program (head of a sequence, part).

    Strides are those of a head, in elements, all else is contiguous; mask uint8 [sequences, columns] in storage order.
    The coded tokens are cut into `parts`; exact ones are the last program's, which has nothing else if there are more.
    coded_q, like q: what the codes of keys are multiplied with; bias float32 [heads, GROUPS] is added to the products.
    """
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q += head * (GROUPS * K_WIDTH)
    coded_q += head * (GROUPS * K_WIDTH)
    mask += head // heads * columns
    k, k_scale, v, v_scale = head * k_stride, head * k_scale_stride, head * v_stride, head * v_scale_stride
    places = parts * TOKENS + 1
    results = partials + head * places * (GROUPS * V_WIDTH)
    stats = partials + (tl.num_programs(0) * V_WIDTH + head * 2) * places * GROUPS
    if part < parts:
        keys = k_a + k, k_b + k, k_c + k, k_scales + k_scale, k_minima + k_scale, k_levels
        values = v_a + v, v_b + v, v_c + v, v_scales + v_scale, v_minima + v_scale, v_levels
        steps = tl.cdiv(coded, BLOCK)
        begin, end = steps * part // parts, steps * (part + 1) // parts
        _coded(coded_q, bias + head * GROUPS, mask, keys, values, results, stats, part, begin, end, coded, sinks, scale,
               K_BITS, K_KIND, K_GROUP, K_WIDTH, K_WORDS, V_BITS, V_KIND, V_GROUP, V_WIDTH, V_WORDS,
               GROUPS, ROWS, TOKENS, BLOCK, MASKED, BIASED, USE_ASM)  # fmt: skip
    if part == tl.num_programs(1) - 1:
        sink = sink_k + head * sink_k_stride, sink_v + head * sink_v_stride
        tail = tail_k + head * tail_k_stride, tail_v + head * tail_v_stride
        new = new_k + head * new_k_stride, new_v + head * new_v_stride
        counts = sinks, coded, tails, news
        _exact(q, mask, sink, tail, new, counts, results, stats, places - 1, scale, K_WIDTH, V_WIDTH, GROUPS,
               EXACT_ROWS, MASKED, PRECISION)  # fmt: skip
    tl.debug_barrier()  # all threads have stored before the arrival is seen
    if tl.atomic_add(counters + head, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        at = head * (GROUPS * V_WIDTH)
        _combine(results, stats, out + at, exact_out + at, mass + head * GROUPS, places, GROUPS, EXACT_ROWS, V_WIDTH,
                 V_KIND == "norm")  # fmt: skip
        tl.store(counters + head, 0)

"""The kernels of compress/kernels/triton/paged.py; imported when the first is launched, because they need triton.

Keys and values are the left operands of all products, S^T = K q^T and out^T = V^T P^T, as in `_kv_attention.py`: bytes
are taken apart in registers and feed the tensor cores. A step reads TOKENS tokens of a KV head. The bytes of the widest
plane of a token are read once and give FIELDS pieces of so many neighbouring channels; narrower planes are read for
each piece. Numbers are float16: a code below 1024 with the exponent of 1024 is one, and 1024 is subtracted exactly.

Tile i is that of request r with i >= starts[r] // QUERIES + r, the last such r: every request has tiles enough, and
nothing but the number of queries and of requests is needed to know how many there are.
"""

# ruff: noqa: PLR0913, PLR0917, ANN001, ANN202 (signatures of kernels)
# mypy: ignore-errors

import triton
import triton.language as tl

from compress.kernels.triton._kv_attention import LOWEST, _softmax
from compress.kernels.triton._parts import powers

LOG2E = tl.constexpr(1.4426950408889634)
HALF_MOST = tl.constexpr(65504.0)  # the largest float16
LEAST_DIVISOR = tl.constexpr(1e-12)  # compress/kv/pages.py has the same
ROUNDER = tl.constexpr(12582912.0)  # added to a float32 below 2^22, it leaves a whole number
THOUSAND = tl.constexpr(0x6400)  # the bits of 1024 as float16


@triton.constexpr_function
def widest(bits):
    """Bits of the widest plane."""
    return next(plane for plane in (8, 4, 2, 1) if bits & plane)


@triton.constexpr_function
def low_bits(bits, plane):
    """Bits of a code in wider planes, which are its lowest."""
    return sum(wider for wider in (8, 4, 2, 1) if bits & wider and wider > plane)


@triton.constexpr_function
def parameter_bytes(width, group, levels):
    """Bytes of the parameters of a token."""
    return 2 if levels else 4 * (width // group)


@triton.jit
def _over_tokens(x, FLIP: tl.constexpr):
    """[tokens] as [tokens, 1], flipped [1, tokens]."""
    return tl.expand_dims(x, 0 if FLIP else 1)


@triton.jit
def _over_channels(x, FLIP: tl.constexpr):
    return tl.expand_dims(x, 1 if FLIP else 0)


@triton.jit
def _load_widest(pages, place, known, BITS: tl.constexpr, WIDTH: tl.constexpr, FLIP: tl.constexpr):
    """The bytes [tokens, bytes] of the widest plane, flipped [bytes, tokens]."""
    i = tl.arange(0, WIDTH * widest(BITS) // 8)
    octets = tl.load(pages + (place[:, None] + i[None, :]), mask=known[:, None], other=0)
    return tl.trans(octets) if FLIP else octets


@triton.jit
def _add_plane(code, pages, place, known, PLANE: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr,
               FIRST: tl.constexpr, COUNT: tl.constexpr, FLIP: tl.constexpr):  # fmt: skip
    """Codes of the channels from FIRST on with the bits of a narrower plane, where there is one."""
    if (BITS & PLANE) != 0 and widest(BITS) > PLANE:
        SIZE: tl.constexpr = WIDTH * PLANE // 8
        LOW: tl.constexpr = low_bits(BITS, PLANE)
        c = FIRST + tl.arange(0, COUNT)
        at = _over_tokens(place, FLIP) + _over_channels(WIDTH * LOW // 8 + c % SIZE, FLIP)
        octets = tl.load(pages + at, mask=_over_tokens(known, FLIP), other=0).to(tl.int16)
        shifts = _over_channels((c // SIZE * PLANE).to(tl.int16), FLIP)
        return code | ((octets >> shifts) & ((1 << PLANE) - 1)) << LOW
    else:
        return code


@triton.jit
def _code(held, pages, place, known, BITS: tl.constexpr, WIDTH: tl.constexpr, FIELD: tl.constexpr,
          FLIP: tl.constexpr):  # fmt: skip
    """Codes int16 of a piece."""
    WIDE: tl.constexpr = widest(BITS)
    COUNT: tl.constexpr = WIDTH * WIDE // 8
    code = (held.to(tl.int16) >> (FIELD * WIDE)) & ((1 << WIDE) - 1)
    for k in tl.static_range(3):
        code = _add_plane(code, pages, place, known, 4 >> k, BITS, WIDTH, FIELD * COUNT, COUNT, FLIP)
    return code


@triton.jit
def _factor(parameters, place, known, index, FIRST: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr,
            FLIP: tl.constexpr):  # fmt: skip
    """float16 that broadcast to a piece: those from the parameter `index` on of the groups of its channels."""
    if FIRST // GROUP == (FIRST + COUNT - 1) // GROUP:
        return _over_tokens(tl.load(parameters + (place + (index + FIRST // GROUP)), mask=known, other=0.0), FLIP)
    else:
        group = index + (FIRST + tl.arange(0, COUNT)) // GROUP
        at = _over_tokens(place, FLIP) + _over_channels(group, FLIP)
        return tl.load(parameters + at, mask=_over_tokens(known, FLIP), other=0.0)


@triton.jit
def _numbers(held, side, known, BITS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, LEVELS: tl.constexpr,
             FIELD: tl.constexpr, FLIP: tl.constexpr):  # fmt: skip
    """Keys or values [tokens, channels] float16 of a piece; flipped [channels, tokens]."""
    pages, place, parameters, parameter_place, levels = side
    COUNT: tl.constexpr = WIDTH * widest(BITS) // 8
    code = _code(held, pages, place, known, BITS, WIDTH, FIELD, FLIP)
    scale = _factor(parameters, parameter_place, known, 0, FIELD * COUNT, COUNT, GROUP, FLIP)
    if LEVELS:
        return (tl.load(levels + code) * scale.to(tl.float32)).to(tl.float16)
    else:
        least = _factor(parameters, parameter_place, known, WIDTH // GROUP, FIELD * COUNT, COUNT, GROUP, FLIP)
        number = (code | THOUSAND).to(tl.float16, bitcast=True) - 1024.0
        return number * scale + least


@triton.jit
def _request(starts, requests, tile, QUERIES: tl.constexpr):
    """The request of a tile: the last whose tiles do not begin after it."""
    low, high = 0, requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) // QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _load_queries(q, m, known, K_BITS: tl.constexpr, K_WIDTH: tl.constexpr):
    """(tuple of q^T [channels, rows] float16 for each piece, what products are to be multiplied with)."""
    whole = tl.load(q + m[None, :] + tl.arange(0, K_WIDTH)[:, None], mask=known[None, :], other=0.0).to(tl.float32)
    up, down = powers(tl.max(tl.abs(whole), 0))
    COUNT: tl.constexpr = K_WIDTH * widest(K_BITS) // 8
    queries = ()
    for f in tl.static_range(K_WIDTH // COUNT):
        at = m[None, :] + (f * COUNT + tl.arange(0, COUNT))[:, None]
        piece = tl.load(q + at, mask=known[None, :], other=0.0).to(tl.float32)
        queries = queries + ((piece * up[None, :]).to(tl.float16),)
    return queries, down * LOG2E


@triton.jit
def _side(pages, page, inside, levels, BITS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
          LEVELS: tl.constexpr, START: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """(pages, codes, pages as float16, parameters, levels): where keys or values are of tokens `inside` pages."""
    CODES: tl.constexpr = BITS * WIDTH // 8
    PARAMETERS: tl.constexpr = parameter_bytes(WIDTH, GROUP, LEVELS)
    halves = pages.to(tl.pointer_type(tl.float16), bitcast=True)
    parameters = page + (START + PAGE * CODES + inside * PARAMETERS)
    return pages, page + (START + inside * CODES), halves, parameters // 2, levels


@triton.jit
def _scores(side, queries, known, BITS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
            LEVELS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Products [tokens, rows] float32 of keys with the queries."""
    s = tl.zeros((TOKENS, ROWS), tl.float32)
    held = _load_widest(side[0], side[1], known, BITS, WIDTH, False)
    for f in tl.static_range(8 // widest(BITS)):
        s = tl.dot(_numbers(held, side, known, BITS, WIDTH, GROUP, LEVELS, f, False), queries[f], s)
    return s


@triton.jit
def _mix(acc, side, p, ratio, known, BITS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
           LEVELS: tl.constexpr):  # fmt: skip
    """acc * ratio + values^T p, a tuple of [channels, rows] float32, one for each piece."""
    held, new = _load_widest(side[0], side[1], known, BITS, WIDTH, True), ()
    for f in tl.static_range(8 // widest(BITS)):
        x = _numbers(held, side, known, BITS, WIDTH, GROUP, LEVELS, f, True)
        new = new + (tl.dot(x, p.to(tl.float16), acc[f] * ratio[None, :]),)
    return new


@triton.jit(do_not_specialize=["requests", "window"])
def attend(q, pages, table, starts, lengths, key_levels, value_levels, sums, stats,
           requests, window, table_step, block_step, head_step, q_token, q_head,
           K_BITS: tl.constexpr, K_WIDTH: tl.constexpr, K_GROUP: tl.constexpr, K_LEVELS: tl.constexpr,
           V_BITS: tl.constexpr, V_WIDTH: tl.constexpr, V_GROUP: tl.constexpr, V_LEVELS: tl.constexpr,
           PAGE: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
           SPLITS: tl.constexpr):  # fmt: skip
    """sums [queries, H, SPLITS, V_WIDTH] float32 and stats [queries, H, SPLITS, 2], the largest score and the sum of
    the powers; program (tile, KV head, split). With one split sums are the results. window 0: all tokens are seen.
    """
    QUERIES: tl.constexpr = ROWS // GROUPS
    VALUES: tl.constexpr = PAGE * (K_BITS * K_WIDTH // 8 + parameter_bytes(K_WIDTH, K_GROUP, K_LEVELS))
    COUNT: tl.constexpr = V_WIDTH * widest(V_BITS) // 8
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = _request(starts, requests, tile, QUERIES)
    start = tl.load(starts + request)
    count, length = tl.load(starts + request + 1) - start, tl.load(lengths + request)
    first = (tile - (start // QUERIES + request)) * QUERIES
    if first < tl.minimum(count, length):
        m = tl.arange(0, ROWS)
        query = first + m // GROUPS
        mine = (query < count) & (m < QUERIES * GROUPS)
        at = (start + query).to(tl.int64) * q_token + (head * GROUPS + m % GROUPS) * q_head
        queries, factor = _load_queries(q, at, mine, K_BITS, K_WIDTH)
        position = length - count + query
        end = tl.minimum(length, length - count + first + QUERIES)
        seen = tl.maximum(length - count + first - tl.where(window > 0, window, length) + 1, 0)
        begin = seen // TOKENS
        steps = tl.cdiv(end, TOKENS) - begin
        acc = ()
        for _ in tl.static_range(8 // widest(V_BITS)):
            acc = acc + (tl.zeros((COUNT, ROWS), tl.float32),)
        top, total = tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32)
        for step in range(begin + steps * split // SPLITS, begin + steps * (split + 1) // SPLITS):
            token = step * TOKENS + tl.arange(0, TOKENS)
            known = (token < end) & (token >= seen)
            block = tl.load(table + request.to(tl.int64) * table_step + token // PAGE, mask=known, other=0)
            page, inside = block.to(tl.int64) * block_step + head * head_step, token % PAGE
            side = _side(pages, page, inside, key_levels, K_BITS, K_WIDTH, K_GROUP, K_LEVELS, 0, PAGE)
            s = _scores(side, queries, known, K_BITS, K_WIDTH, K_GROUP, K_LEVELS, TOKENS, ROWS)
            keep = known[:, None] & (token[:, None] <= position[None, :])
            keep = keep & ((token[:, None] > position[None, :] - window) | (window <= 0))
            p, ratio, top, total = _softmax(s * factor[None, :], keep, top, total)
            side = _side(pages, page, inside, value_levels, V_BITS, V_WIDTH, V_GROUP, V_LEVELS, VALUES, PAGE)
            acc = _mix(acc, side, p, ratio, known, V_BITS, V_WIDTH, V_GROUP, V_LEVELS)
        row = (start + query).to(tl.int64) * (tl.num_programs(1) * GROUPS) + head * GROUPS + m % GROUPS
        place = row * SPLITS + split
        for f in tl.static_range(8 // widest(V_BITS)):
            result = acc[f] / total[None, :] if SPLITS == 1 else acc[f]
            channel = f * COUNT + tl.arange(0, COUNT)
            tl.store(sums + place[None, :] * V_WIDTH + channel[:, None], result, mask=mine[None, :])
        if SPLITS > 1:
            tl.store(stats + place * 2, top, mask=mine)
            tl.store(stats + place * 2 + 1, total, mask=mine)


@triton.jit
def merge(sums, stats, out, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """out [rows, WIDTH] of sums [rows, SPLITS, WIDTH] and stats [rows, SPLITS, 2]; 0 where nothing was seen."""
    row, i, c = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    top = tl.load(stats + (row * SPLITS + i) * 2)
    total = tl.load(stats + (row * SPLITS + i) * 2 + 1)
    weight = tl.where(total > 0, tl.exp2(top - tl.max(tl.where(total > 0, top, LOWEST), 0)), 0.0)
    parts = tl.load(sums + (row * SPLITS + i)[:, None] * WIDTH + c[None, :], mask=(weight > 0)[:, None], other=0.0)
    whole = tl.sum(weight * total, 0)
    result = tl.sum(parts * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(out + row * WIDTH + c, result)


@triton.jit
def _nearest(x, levels, edges, BITS: tl.constexpr):
    """Codes int32 of the nearest levels: how many edges are below; of 2^BITS edges the last is infinity."""
    edge = tl.load(edges + tl.arange(0, 1 << BITS))
    return tl.sum((x[:, None] > edge[None, :]).to(tl.int32), 1)


@triton.jit
def _store_plane(code, pages, place, PLANE: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Store a plane of the codes [WIDTH] of a token, if they have it."""
    if (BITS & PLANE) != 0:
        SIZE: tl.constexpr = WIDTH * PLANE // 8
        LOW: tl.constexpr = low_bits(BITS, PLANE)
        part = tl.reshape((code >> LOW) & ((1 << PLANE) - 1), (8 // PLANE, SIZE))
        octets = tl.sum(part << (PLANE * tl.arange(0, 8 // PLANE))[:, None], 0)
        tl.store(pages + place + (WIDTH * LOW // 8 + tl.arange(0, SIZE)), octets.to(tl.uint8))


@triton.jit
def _put(side, x, edges, BITS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
         LEVELS: tl.constexpr):  # fmt: skip
    """Code x [WIDTH] float32 and store it."""
    pages, place, halves, parameter_place, levels = side
    parameters = halves + parameter_place
    MOST: tl.constexpr = (1 << BITS) - 1
    if LEVELS:
        size = tl.maximum(tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 0), WIDTH * 1.0)), LEAST_DIVISOR)
        level = tl.load(levels + _nearest(tl.div_rn(x, size + tl.zeros_like(x)), levels, edges, BITS))
        norm = tl.div_rn(tl.sum(x * level, 0), tl.sum(level * level, 0))
        norm = tl.minimum(tl.maximum(norm, 0.0), HALF_MOST).to(tl.float16)
        tl.store(parameters, norm)
        divisor = tl.maximum(norm.to(tl.float32), LEAST_DIVISOR)
        code = _nearest(tl.div_rn(x, divisor + tl.zeros_like(x)), levels, edges, BITS)
    else:
        GROUPS: tl.constexpr = WIDTH // GROUP
        y = tl.reshape(x, (GROUPS, GROUP))
        least = tl.minimum(tl.maximum(tl.min(y, 1), -HALF_MOST), HALF_MOST).to(tl.float16)
        base = least.to(tl.float32)
        scale = tl.div_rn(tl.max(y, 1) - base, tl.full((GROUPS,), MOST, tl.float32))
        scale = tl.minimum(tl.maximum(scale, 0.0), HALF_MOST).to(tl.float16)
        step = tl.where(scale > 0, scale.to(tl.float32), 1.0)
        number = tl.div_rn(y - base[:, None], step[:, None] + tl.zeros_like(y))
        number = tl.minimum(tl.maximum(number, 0.0), MOST * 1.0) + ROUNDER
        code = tl.reshape((number - ROUNDER).to(tl.int32), (WIDTH,))
        group = tl.arange(0, GROUPS)
        tl.store(parameters + group, scale)
        tl.store(parameters + GROUPS + group, least)
    for k in tl.static_range(4):
        _store_plane(code, pages, place, 8 >> k, BITS, WIDTH)


@triton.jit
def encode(keys, values, pages, slots, key_levels, value_levels, key_edges, value_edges,
           key_token, key_head, value_token, value_head, block_step, head_step,
           K_BITS: tl.constexpr, K_WIDTH: tl.constexpr, K_GROUP: tl.constexpr, K_LEVELS: tl.constexpr,
           V_BITS: tl.constexpr, V_WIDTH: tl.constexpr, V_GROUP: tl.constexpr, V_LEVELS: tl.constexpr,
           PAGE: tl.constexpr):  # fmt: skip
    """Code and write a token of a KV head: program (token, KV head)."""
    VALUES: tl.constexpr = PAGE * (K_BITS * K_WIDTH // 8 + parameter_bytes(K_WIDTH, K_GROUP, K_LEVELS))
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        page, inside = slot // PAGE * block_step + head * head_step, slot % PAGE
        side = _side(pages, page, inside, key_levels, K_BITS, K_WIDTH, K_GROUP, K_LEVELS, 0, PAGE)
        x = tl.load(keys + token * key_token + head * key_head + tl.arange(0, K_WIDTH)).to(tl.float32)
        _put(side, x, key_edges, K_BITS, K_WIDTH, K_GROUP, K_LEVELS)
        side = _side(pages, page, inside, value_levels, V_BITS, V_WIDTH, V_GROUP, V_LEVELS, VALUES, PAGE)
        x = tl.load(values + token * value_token + head * value_head + tl.arange(0, V_WIDTH)).to(tl.float32)
        _put(side, x, value_edges, V_BITS, V_WIDTH, V_GROUP, V_LEVELS)

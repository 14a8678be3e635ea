"""Let a model read a prompt under sparse attention: vertical lines and slashes, or blocks, at a share of all products.

Attention is computed under masks, so that results are those of a sparse kernel and no time is saved. Each query head
has a pattern of its own; the first `DENSE_LAYERS` layers attend to everything.

vertical_slash   MInference (arXiv 2407.02490): attention of the last LAST_QUERIES queries, summed over columns and over
                 diagonals, chooses as many columns as diagonals; the first SINKS columns and the LOCAL diagonals next
                 to the main one are always among them. Their number is the largest whose pattern has at most `share`
                 of the products under the main diagonal, counted exactly.
block_sparse     blocks of BLOCK queries and keys, each known by its mean; a block of queries reads the blocks of keys
                 with the largest products, the first one and its own always. As many for each block of queries.

Both are the patterns that "The Sparse Frontier" (arXiv 2504.17768) measures; budgets are found anew for each head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "sparse_prefill"
DENSE_LAYERS = 2
LAST_QUERIES, SINKS, LOCAL, BLOCK = 64, 4, 8, 16


def vertical_slash(q: Tensor, k: Tensor, share: float) -> Tensor:
    """q, k [H, n, width], scaled -> bool [H, n, n], which products are computed."""
    heads, n, _ = q.shape
    last = min(LAST_QUERIES, n)
    place = torch.arange(n)
    follows = place > place[n - last :, None]
    p = (q[:, n - last :] @ k.mT).float().masked_fill_(follows, -torch.inf).softmax(-1)
    columns = p.sum(1)
    offsets = (place[n - last :, None] - place).clamp(min=0)
    diagonals = torch.zeros(heads, n).scatter_add_(1, offsets.flatten().expand(heads, -1), p.flatten(1))
    for scores, count in ((columns, SINKS), (diagonals, LOCAL)):  # always chosen, and the first of them first
        scores[:, :count] = torch.arange(count, 0, -1) * (last + 1.0)
    orders = columns.argsort(-1, descending=True), diagonals.argsort(-1, descending=True)
    return torch.stack([_lines(*(order[head] for order in orders), share) for head in range(heads)])


def _lines(columns: Tensor, diagonals: Tensor, share: float) -> Tensor:
    """Return the pattern of the first columns and diagonals, of each as many as `share` has room for."""
    n = len(columns)
    most, low, high = share * n * (n + 1) / 2, 1, n
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _products(columns[:middle], diagonals[:middle], n) <= most else (low, middle - 1)
    is_column, is_diagonal = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    is_column[columns[:low]] = True
    is_diagonal[diagonals[:low]] = True
    by_offset = torch.cat((is_diagonal.flip(0), torch.zeros(n, dtype=torch.bool)))  # at n - 1 - offset
    on_diagonal = by_offset.as_strided((n, n), (1, 1)).flip(0)  # row i, column j: offset i - j
    return (is_column | on_diagonal).tril()


def _products(columns: Tensor, diagonals: Tensor, n: int) -> int:
    """Return how many places on or under the main diagonal lie on one of the lines."""
    is_diagonal = torch.zeros(n, dtype=torch.long)
    is_diagonal[diagonals] = 1
    crossings = is_diagonal.cumsum(0)[n - 1 - columns]
    return int((n - columns).sum() + (n - diagonals).sum() - crossings.sum())


def block_sparse(q: Tensor, k: Tensor, share: float) -> Tensor:
    """q, k [H, n, width], scaled -> bool [H, n, n], which products are computed."""
    heads, n, _ = q.shape
    blocks = -(-n // BLOCK)
    means = []
    for x in (q, k):
        padded = torch.nn.functional.pad(x.float(), (0, 0, 0, blocks * BLOCK - n)).unflatten(1, (blocks, BLOCK))
        counts = torch.full((blocks, 1), float(BLOCK))
        counts[-1] = n - (blocks - 1) * BLOCK
        means.append(padded.sum(2) / counts)
    scores = means[0] @ means[1].mT
    number = torch.arange(blocks)
    scores.masked_fill_(number > number[:, None], -torch.inf)
    scores[:, :, 0] = torch.inf
    scores[:, number, number] = torch.inf
    count = block_count(blocks, share)
    chosen = torch.zeros(heads, blocks, blocks, dtype=torch.bool)
    chosen.scatter_(2, scores.topk(count, -1).indices, True)
    whole = chosen.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :n, :n]
    return whole.tril()


def block_count(blocks: int, share: float) -> int:
    """Return the largest number of blocks for each row, at least 2, whose pattern has at most `share` of all."""
    most = share * blocks * (blocks + 1) / 2
    counts = [count for count in range(1, blocks + 1) if count * (count + 1) / 2 + (blocks - count) * count <= most]
    return max(2, max(counts, default=1))


PATTERNS = {"vertical_slash": vertical_slash, "block_sparse": block_sparse}


def read_prompt(model: Any, tokens: Tensor, pattern: str, share: float) -> tuple[DynamicCache, float]:
    """Read tokens int64 [1, n] under a pattern; return the cache, and the share of products that was computed."""
    shares: list[float] = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        if module.layer_idx < DENSE_LAYERS:
            return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        groups = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (key, value))
        found = PATTERNS[pattern](query[0] * kwargs["scaling"], keys[0], share)
        shares.append(float(found.sum()) / len(found) / (found.shape[1] * (found.shape[1] + 1) / 2))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=found[None], scale=kwargs["scaling"]
        )
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    before, model.config._attn_implementation = model.config._attn_implementation, NAME
    cache = DynamicCache(config=model.config)
    try:
        model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    finally:
        model.config._attn_implementation = before
    return cache, sum(shares) / len(shares)

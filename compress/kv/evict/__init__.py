"""Evict tokens from a compressed cache: which tokens a layer forgets, and the layer that forgets them.

    kv_cache: {evict: {method: snapkv, keep: 0.5}, method: kivi, bits: 4}

Tokens are chosen after the prompt, removed, and the survivors are coded as any tokens are. settings.py holds the
settings, select.py turns scores into survivors and counts them, layer.py is the cache layer, queries.py shows it the
queries where attention reads tensors, judging.py measures what scores need, placing.py gathers and merges the tokens
that stay, head_stores.py stores heads of different lengths.

A method is one file compress/kv/evict/<name>.py; <name> is what recipes give as `method`. It defines:

1.  `Config`, a frozen dataclass: its settings. It raises ValueError for impossible ones, the field's name first.
2.  `NEEDS`, a frozenset of what it reads beside keys and values: "queries" (after the rotary embedding, of the prompt
    or, while decoding, of the newest `keeps` tokens), "moments" (mean and covariance of queries).
3.  `score(config, seen) -> Tensor` of a `select.Seen`, one sequence without padding: float32 [h, n], larger for tokens
    that are kept, positive.
4.  Where it keeps newest tokens of its own accord, `keeps(config, kept) -> int`: their number where a head keeps `kept`
    tokens, and with kept = 0 the least there is.
5.  Where its defaults of the common settings differ, `DEFAULTS`, a mapping of fields of `settings.Budget`.
6.  Where it cannot evict while decoding, `PROMPT_ONLY = True`.
7.  Where it has no use for some of the common settings, `check(budget)`: it raises ValueError, the field's name first.
8.  `LAYER`, the class of the cache's layers: `layer.EvictingLayer`, or a subclass that has `of_cache` of its own.
9.  Where not all codings are possible, `refusal(config, coding)`: why not, None where one is. Where tokens that it does
    not keep stay with fewer bits, or those of a text all stay, `keeps_all(config)`: bytes are then counted as if all
    were kept.
10. Where its layers drop tokens within the prompt's forward pass, `PRUNES = True`: a cache is then refused for models
    whose decoder is no list of blocks.
"""

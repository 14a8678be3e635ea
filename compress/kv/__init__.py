"""Compress the keys and values that a model caches: codecs, the cache that transformers sees, and attention on codes.

    from compress.kv.cache import make_cache
    cache = make_cache(model.config, {"method": "kivi", "bits": 4, "sink": 4, "residual_length": 128})
    model.generate(**inputs, past_key_values=cache)         # decode, then attend, with any attention function
    cache.nbytes()                                          # bytes by part, from the tensors themselves

    from compress.kv import attention, hooks
    attention.register(); model.set_attn_implementation(attention.NAME)
    hooks.attach(model)                                     # tells caches of left padding and rotary embeddings
    make_cache(model.config, settings, path="fused")        # attention reads the stored codes

settings.py reads the settings, layer.py is a layer of a cache, cache.py makes caches, token_store.py keeps the tokens
of a layer (sink | coded | tail) in rows of buffer.py, codec.py is the base of all codecs, attention.py attends to
stored codes, rope.py and hooks.py serve codecs of keys before the rotary embedding, generation.py makes `generate` use
all this. Layers that forget tokens are in evict/, layers that read a part of them in sparse/.

A codec is one file compress/kv/codecs/<name>.py; <name> is what recipes give as `method`. It defines:

1.  `Config`, a frozen dataclass: the settings for keys or for values. It raises ValueError for impossible ones, with
    the field's name first.
2.  `NEEDS`, a frozenset of the samples that calibration must bring, empty if none: "keys", "keys_pre" (before the
    rotary embedding), "values", "queries", "queries_pre", "queries_scaled" (as attention multiplies them with keys),
    "attended" (p^2 over the queries that read a token, [tokens, h, 1]), "gradients" (of the loss, by keys_pre or by
    values), "gradients_rotated" (by keys or by values), "gradients_output" (by the output of attention, [tokens, H,
    width]), "keys_sink" and "values_sink" ([samples, sink, h, width], what the others leave out).
3.  `build(config, spec, static) -> Codec`, called once for the keys and once for the values of each layer. It raises
    RecipeError where the settings do not fit the layer.
4.  Only if NEEDS is not empty: `calibrate(config, spec, samples) -> dict[str, Tensor]`. samples: name -> float32
    [tokens, h, width], queries [tokens, H, width], without sinks and padding. What it returns is stored as
    "layers.<i>.<keys|values>.<name>" and comes back to `build` as `static`. And, if not all heads can be stored,
    `check_heads(config, spec)`: it raises what `build` does for settings that do not fit the layer, before calibration.
    And, if layers share a budget, `balance(learned)`: after all layers it is given (config, spec, static) of each codec
    of this method, in order of layers, keys first, and changes the tensors `static` in place; `distil(learned, text)`,
    called before that to train these through the whole model (text: calib/kv.py's TextPass); and `ALONE`, for
    allocations that choose layer by layer: {setting: (value with which layers share a budget, value to put in its place
    so that a layer has one of its own)}.
5.  With `calibrate`: `specs(config, spec) -> {name: (shape, dtype)}` of what it returns, on which compiled code relies;
    `typical(config, spec) -> {name: tensor}` where bytes depend on numbers in these tensors that are no setting of
    `Config` by the same name, such as ranks: they are counted so before calibration;
    and `check(static, config, spec)` where more can be wrong with a tensor than a number that is not finite, such as an
    order with a channel twice: ValueError, which begins with the tensor's name. static.py calls both before `build`,
    whether tensors come from a file or from a caller.
6.  A subclass of `codec.Codec`. It must have `fields` (what is stored), `encode` and `decode`; the rest has defaults.

The cache calls a codec like this:

1.  Once: it reads `granularity`, `fields`, `rope`, `needs_queries`, `reconstructs` and `block`.
2.  At the first coded tokens: `begin(x, queries)` returns the state of the sequences, tensors [B, ...]. Operations on
    the batch (reordering, repeating) act on them too.
3.  At each flush: `encode(x, state)` returns rows of every field, which are appended. x is float32, whole groups, at
    most token_store.ENCODE_TOKENS. No token is coded twice, and rows never change.
4.  At each step with path="decode": `dense(block)` for `block` tokens at a time, which is `decode(block)`, with the
    rotary embedding if `rope` is "pre".
5.  At each step with path="fused": `query(q, state)` once; `scores(query, block)` for blocks of `at_once(query)`
    tokens; a softmax over all tokens; `mix(p, block)`, added up over blocks; `output(mixed, mass, state)` once. q is
    float32 and scaled; its rows are the query heads of a KV head times the query tokens.

A block holds rows of the fields by name, the state, and for `rope` = "pre" cos and sin of its tokens (compiled readers
get `halves` instead; generation then needs hooks.attach). It shares memory with the store: never write to it. A row
stands for `Field.tokens` tokens, or for all tokens that were encoded together. Heads may share a row, [B, 1, n, ...].

Only path="fused" works for a codec with `needs_queries` (`begin` is then given queries [B, H, n, width]) and for one
without `decode` (`reconstructs` = False). If some settings of a codec need queries, its `Config` has
`needs_queries(kind) -> bool`, so that they are refused before anything is built where there is no fused attention.

Exact are the first `sink` tokens, the last `residual_length` or more, and, with `exact_prefill`, all tokens within one
forward pass. Bytes are those of the tensors as they are stored; `static` is counted apart and must hold every tensor
that a codec keeps for itself.
"""

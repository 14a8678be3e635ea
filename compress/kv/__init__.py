"""Compressed KV caches: one codec a file, one store, one cache, two ways to read.

    from compress.kv.cache import make_cache
    cache = make_cache(model.config, {"method": "kivi", "bits": 4, "sink": 4, "residual_length": 128})
    model.generate(**inputs, past_key_values=cache)         # path A: any attention function
    cache.nbytes()                                          # bytes by part, from the tensors themselves

    from compress.kv import attention, hooks
    attention.register(); model.set_attn_implementation(attention.NAME)
    hooks.attach(model)                                     # left padding and rotary embeddings, for both paths
    make_cache(model.config, recipe, path="scores")         # path B: reads what is stored

The files: codec (the contract), codes (bits packed along channels), pieces (bits that differ
between channels), buffer (rows that grow), store (sink | coded |
tail), settings (the recipe), cache (what transformers sees), attention (path B), rope and hooks. The others are codecs.

A codec is one file `compress/kv/codecs/<name>.py`; the name is the recipe's `method`. It defines

    Config    frozen dataclass: the recipe's settings for keys or for values; ValueError for impossible ones
    NEEDS     frozenset of the samples that calibration must bring, empty if it needs none: "keys", "keys_pre" (before
              RoPE), "values", "queries", "queries_pre" and "gradients" (of the loss, by what the codec is of:
              keys_pre or values)
    build(config, spec, static) -> Codec     for the keys or the values of one layer; RecipeError if they do not fit
    calibrate(config, spec, samples) -> dict[str, Tensor]     only if NEEDS is not empty: the static tensors; samples
              name -> [tokens, h, width] float32 (queries [tokens, H, width]), sinks and padding left out. Training
              belongs here. The result is stored as "layers.<i>.<keys|values>.<name>" and comes back as `static`

and a subclass of `codec.Codec`, of which only `fields`, `encode` and `decode` are needed. What is called when:

    once            build; its `granularity`, `fields`, `rope`, `needs_queries`, `reconstructs`, `block` are read
    first tokens    begin(x, queries) -> state of the sequences, tensors [B, ...]: batch operations act on them too
    each flush      encode(x, state) -> rows of every field, appended; x float32, whole groups, at most
                    store.ENCODE_TOKENS. Rows are never changed afterwards, and x is coded once
    path A, a step  dense(block) = decode(block), rotated if rope is "pre", for `block` tokens at a time
    path B, a step  query(q, state) once; scores(query, block) for blocks of at_once(query) tokens; softmax over
                    everything; mix(p, block) added up over blocks; output(mixed, mass, state) once. q is float32,
                    scaled by the attention's factor, its rows are the query heads of a KV head times the query tokens

A block holds rows of the fields (name -> tensor), what `begin` returned, and for rope = "pre" cos and sin of the
tokens, or `halves` of them for a compiled reader (generation then needs hooks.attach).
Slices of fields share memory with the store and must not be written to. Which codecs need path B: those with
`needs_queries` (begin is then given queries [B, H, n, width], the first time tokens are coded) and those without
`decode` (`reconstructs = False`). Rows of a field may stand for `tokens` tokens, or for a run of tokens encoded
together; heads of different ranks share one row [B, 1, n, sum of ranks].

What is exact: the first `sink` tokens, the last `residual_length` or more, and, with `exact_prefill`, everything within
one forward pass. Bytes: each field counts for its part as it is stored, so what is not packed costs what it costs;
`static` is counted apart and must hold every tensor that a codec keeps for itself.
"""

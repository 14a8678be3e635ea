"""Read a part of the stored tokens: memory stays, traffic falls.

    kv_cache: {read: {method: double_sparsity, keep: 0.0625}, method: kivi, bits: 4}

The first forward pass of a cache (the prompt) attends to everything. Every later query reads, of the past,

    sinks | chosen coded tokens | coded tokens that are not candidates yet | exact tail | tokens of its own pass

and a method is a rule that chooses. Only fused attention reads so (`path="fused"`). Where one token is read and the
codec keeps a row for each token, the rows of the chosen tokens are gathered, and only these are read (layer.py).
Several queries at once, and codecs whose tokens share rows, read everything under a mask: the same numbers, no traffic
saved. All query heads of a KV head read the same tokens.

A method is one file compress/kv/sparse/<name>.py; <name> is what recipes give as `method`. It defines:

1.  `Config`, a frozen dataclass of its settings. It raises ValueError for impossible ones, the field's name first.
2.  `build(config, spec, static) -> Reader` (reader.py), once for each layer of each cache: a reader holds what belongs
    to the sequences. `spec` is that of the layer's keys.
3.  `NEEDS`, a frozenset of the samples that calibration must bring (compress/kv/__init__.py), empty if none. With it
    `calibrate(config, spec, samples)`, `specs(config, spec)` and `WORK` as a codec has them, and `check` where more can
    be wrong with a tensor than a number that is not finite; what is learned is stored as "layers.<i>.read.<name>".
4.  `LAYER = layer.ReadingLayer`, the class of the cache's layers.
"""

"""Stream the cache of a prompt at the level that the network allows, CacheGen's controller (arXiv 2310.07240).

The cache of a long prompt is coded at several levels, cut into pieces of tokens. While pieces arrive, the controller
chooses for each next one its level, or its text, from which the model computes it anew, so that the first token comes
before a deadline and as little as possible is lost. Pieces are decoded while the next ones are on their way.

    levels.py      write the pieces of all levels into a folder; read them from a folder or through any `fetch`
    controller.py  choose by bandwidth and deadline; simulate a network with a trace of its bandwidth
    stream.py      fetch, decode and compute at the same time, into a cache that `generate` takes

How a piece is coded is that of saved caches (compress/kv/saved, which says what differs from the paper's codes). In the
paper a level has other steps of quantization; so it has here. What all levels share (exact first tokens, principal
components) is sent once. Measured: docs/results/kv_streaming.md.

Formulas were taken from what is publicly said of the paper, its code for the controller was not at hand. Not done:
several requests that share a network, and sending anything: `fetch` is the caller's.
"""

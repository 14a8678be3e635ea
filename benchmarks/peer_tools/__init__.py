"""Other tools, one module each: how each quantizes a model, and how what it stored is read back without it.

`peers.py` runs the module that is named, so that a tool is added by a file alone. A module has

    DISTRIBUTION                    the package whose version is reported
    quantize(args, windows, out)    writes what the tool stores below `out`; returns the clock of quantization alone
    restore(packed, model)          the float32 tensors by the names of the source model, from what was stored
    stored_bytes(packed, model)     bytes of every stored tensor; those of a linear lie below its name
    add_options(parser)             where the tool has options of its own

`quantize` imports the tool; the others import torch, safetensors and, for GGUF files, the package gguf.
`common.py` and `blocks.py` are shared by the modules and are no tools.
"""

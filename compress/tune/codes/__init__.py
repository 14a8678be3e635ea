"""Train one packed weight, its codes or what lies beside them: one file a way, looked up by its file name.

A file has
- `serves(packed) -> bool`: whether a weight can be trained so; if not, its codes stay (`fixed`);
- `Codes(packed, target, rates)`: a `TrainedWeight` (compress/tune/trained.py) of one weight, which gives the stored
  weight to the bit before the first step; target [out, in]: the weight that was quantized;
- `BYTES`: of memory for a weight, beside what `fixed` takes;
- `RATE`: how far codes travel where `codes_rate` of the settings is none, in the unit that the file states.
"""

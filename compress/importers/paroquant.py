"""Read ParoQuant: AWQ's integers of 4 bits behind scales and rotations of pairs of inputs (arXiv 2511.10645).

qweight, qzeros and scales are those of AWQ, in groups. Inputs are multiplied by channel_scales [1, in]; then in each of
krot rounds, within each group, theta [krot, in / 2] rotates the pairs (i, j) that pairs int16 [krot, in] lists, numbers
within the group: (x_i, x_j) <- (x_i cos + x_j sin, x_j cos - x_i sin). The weight takes the rotations in here, the last
round first, and the scales, in float32. Experts of a module share theirs: gate_up_weight_theta and so on lie beside
their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.importers import options, scaled
from compress.importers.awq_codes import decode_rows
from compress.importers.source import CheckpointSource, Decoded
from compress.storage.checkpoint import Readable, StoredTensor

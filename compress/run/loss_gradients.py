"""Take the gradients of the loss before the first block is quantized, where the recipe needs them.

Gradients of weights are for low-rank parts and tuning that go by them (compress/calib/fisher.py). Gradients at outputs
of linears are for two-sided rounding and scales by sensitivity (compress/calib/output_gradients.py): they are kept in a
folder, beside the output or in that of `--measurements`, and read by every run that needs them of the same model and
text. The processes of a run share out the samples, and hand the rows of a linear to the one that sums them up.

A transform of the whole model keeps its function and may change what linears give: the gradients are then those of the
transformed model, under a key of their own. With a transform of blocks, which is chosen while they are quantized, they
cannot be had: compress/run/demands.py refuses such a recipe.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress import plugins, process_memory, ranks
from compress.calib import output_gradients
from compress.calib.backward_pass import BackwardPass, linear_names
from compress.calib.gradient_store import BlockReader, GradientStore, as_stored
from compress.calib.output_gradients import BlockOutputs, Rows, SampledLabels
from compress.model import blockwise, fingerprint
from compress.model.skeleton import Skeleton
from compress.numerics import checks
from compress.ranks import Ranks
from compress.recipe import fingerprint as recipe_fingerprint
from compress.recipe import schema
from compress.run.job import Job
from compress.types import LinearSpec

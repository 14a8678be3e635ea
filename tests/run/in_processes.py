"""Run setups one after the other, in each of the processes that torchrun starts, or in one.

PYTHONPATH=.:tests python tests/run/in_processes.py FOLDER NAME...   # reads FOLDER/<model>, writes FOLDER/<processes>
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from compress import api, ranks
from compress.quant import feedback
from compress.run import memory_plan
from helpers.runs import Setup, job

SMALL = ("calibration.num_samples=10", "calibration.seq_len=32")
BATCH_TOKENS = 64  # five batches: uneven parts
ROWS = 16  # of a tile: what is one tile otherwise is divided here
BLOCKS = "{method: blockwise, steps: 4, between: 2}"
WHOLE = "{method: end_to_end, steps: 6, batch_tokens: 64, held_out: 3}"
SETUPS = {
    "gptq": ("llama", Setup("int3", (*SMALL, "calibration.importance=attention"))),
    "paired": ("llama", Setup("vq2bit", (*SMALL, "state_bits=6", "tile_rows=16", "out_scales=rms"))),
    "experts": ("mixtral", Setup("int3", SMALL)),
    "static": ("llama", Setup("w8a8-smooth", SMALL)),
    "lowrank": ("llama", Setup("int3-eora", SMALL)),
    "rotated": ("llama", Setup("rsq3bit", SMALL)),
    "mixed": ("llama", Setup("mixed3bit", (*SMALL, "allocate.samples=3"))),
    "plain": ("llama", Setup("int8", ())),
    "nested": ("llama", Setup("nested8", SMALL)),
    "tuned": ("llama", Setup("int3", (*SMALL, f"tune=[{BLOCKS}, {WHOLE}]"))),
}


def main(folder: Path, names: list[str]) -> None:
    """Run the setups of these names."""
    torch.set_num_threads(1)
    memory_plan.BATCH_TOKENS = BATCH_TOKENS
    feedback.ROWS_PER_TILE = ROWS
    out = folder / str(ranks.given()[1])
    with ranks.joined("cpu"):
        for name in names:
            model, setup = SETUPS[name]
            api.quantize(job(folder / model, setup, out / name))


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    main(Path(sys.argv[1]), sys.argv[2:])

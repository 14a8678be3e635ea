"""Read checkpoints with transformers in one process in which compress is not loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

TOKENS = torch.arange(40).view(2, 20) * 5
READ = """
import json, sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
paths, dtype = json.load(sys.stdin)
for path in paths:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    assert "compress" not in sys.modules
    with torch.no_grad():
        print(model(torch.arange(40).view(2, 20) * 5).logits.tolist())
"""


def logits(directories: Sequence[Path], folder: Path, dtype: str = "float32") -> list[Tensor]:
    """Logits of TOKENS by each checkpoint, computed in `dtype`; `folder`: where the process works."""
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=json.dumps([[str(directory) for directory in directories], dtype]),
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [torch.tensor(json.loads(line)) for line in done.stdout.splitlines()]

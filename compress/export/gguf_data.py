"""Read the tables of gguf.yaml: what llama.cpp calls things."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("gguf.yaml").read_text(encoding="utf-8"))
TOOL: str = DATA["tool"]  # the name of llama.cpp in messages

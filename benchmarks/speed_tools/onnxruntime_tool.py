"""A directory that `compress export --to onnx` wrote, in onnxruntime: `onnxruntime_tool.py DIR`."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnxruntime
import protocol


class OnnxRuntime:
    """A session on one thread; keys and values stay where the last step has written them."""

    def __init__(self, directory: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(f"{directory}/model.onnx", options, ["CPUExecutionProvider"])
        self.inputs = {each.name: each for each in self.session.get_inputs()}
        self.outputs = [each.name for each in self.session.get_outputs()]
        self.vocabulary = self.session.get_outputs()[0].shape[-1]
        self.filled: dict[tuple[int, int], tuple[dict[str, Any], Any]] = {}
        self.past: dict[str, Any] = {}
        self.place, self.last = 0, np.zeros((1, 1), np.int64)

    def fill(self, rows: int, context: int) -> None:
        if (rows, context) not in self.filled:
            self.prefill(rows, context)
            self.filled = {(rows, context): (self.past, self.last)}
        self.past, self.last = self.filled[rows, context]
        self.place = context

    def step(self, rows: int) -> None:
        self._run(self.last)

    def prefill(self, rows: int, tokens: int) -> None:
        self.place, self.past = 0, {}
        for name, each in self.inputs.items():
            if name.startswith("past"):
                kind = {"tensor(float)": np.float32, "tensor(float16)": np.float16}[each.type]
                empty = np.zeros((rows, each.shape[1], 0, each.shape[3]), kind)
                self.past[name] = onnxruntime.OrtValue.ortvalue_from_numpy(empty)
        self._run(np.random.default_rng(0).integers(10, self.vocabulary - 10, (rows, tokens)))

    def _run(self, ids: Any) -> None:
        rows, count = ids.shape
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", ids.astype(np.int64))
        binding.bind_cpu_input("attention_mask", np.ones((rows, self.place + count), np.int64))
        if "position_ids" in self.inputs:
            places = np.arange(self.place, self.place + count, dtype=np.int64)
            binding.bind_cpu_input("position_ids", np.tile(places, (rows, 1)))
        for name, value in self.past.items():
            binding.bind_ortvalue_input(name, value)
        for name in self.outputs:
            binding.bind_output(name)
        self.session.run_with_iobinding(binding)
        values = dict(zip(self.outputs, binding.get_outputs(), strict=True))
        self.last = values[self.outputs[0]].numpy()[:, -1:].argmax(-1)
        self.past = {name: values[name.replace("past_key_values", "present")] for name in self.past}
        self.place += count


protocol.serve(OnnxRuntime(sys.argv[1]))

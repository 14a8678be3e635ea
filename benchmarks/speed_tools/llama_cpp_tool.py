"""A GGUF file in llama.cpp: `llama_cpp_tool.py FILE`; needs the package llama-cpp-python (LLAMA_CPP_LIB_PATH)."""

from __future__ import annotations

import sys

import numpy as np
import protocol
from llama_cpp import llama_cpp as lib

MOST_ROWS, MOST_TOKENS, BATCH = 8, 4096, 512


class LlamaCpp:
    """A context on one thread."""

    def __init__(self, file: str) -> None:
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = MOST_TOKENS, MOST_ROWS
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = 1
        params.kv_unified = True
        self.context = lib.llama_init_from_model(self.model, params)
        self.memory = lib.llama_get_memory(self.context)
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        self.kept = (0, 0)
        self.place, self.last = 0, [1] * MOST_ROWS

    def fill(self, rows: int, context: int) -> None:
        if self.kept != (rows, context):
            lib.llama_memory_clear(self.memory, True)
            for row in range(rows):
                self._read(row, context)
            self.kept = (rows, context)
        for row in range(rows):
            lib.llama_memory_seq_rm(self.memory, row, context, -1)
        self.place = context

    def step(self, rows: int) -> None:
        self._decode([(self.last[row], row, self.place, True) for row in range(rows)])
        for row in range(rows):
            logits = lib.llama_get_logits_ith(self.context, row)
            self.last[row] = int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())
        self.place += 1

    def prefill(self, rows: int, tokens: int) -> None:
        lib.llama_memory_clear(self.memory, True)
        self.kept = (0, 0)
        for row in range(rows):
            self._read(row, tokens)

    def _read(self, row: int, tokens: int) -> None:
        ids = np.random.default_rng(row).integers(10, self.vocabulary - 10, tokens).tolist()
        for first in range(0, tokens, BATCH):
            part = ids[first : first + BATCH]
            self._decode([(token, row, first + i, first + i == tokens - 1) for i, token in enumerate(part)])

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, row, place, is_read) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, place, 1
            batch.seq_id[i][0], batch.logits[i] = row, is_read
        if lib.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp could not decode the batch")


@lib.llama_log_callback
def _ignore(level: int, text: bytes, data: object) -> None:
    pass


lib.llama_log_set(_ignore, None)
protocol.serve(LlamaCpp(sys.argv[1]))

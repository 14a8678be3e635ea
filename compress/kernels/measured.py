"""Choose the fastest of several ways by measuring them, once for a machine.

The same instructions differ between processors by factors that their names do not tell, and so do the libraries that
use them. An answer is kept on disk beside the object code of compress/kernels/llvm.py, under the same rules of trust.
Its key is a hash of the question, the names of the candidates, the processor with its features, and the versions of
torch, LLVM and this package. The answer that is kept first is that of all processes.

The first candidate is the answer where nothing can be measured or kept: without compiled functions, without a folder
that can be written, and while torch traces a model or makes tensors without elements. So it has to be a sound guess.
It also stays where no other takes less than `CLEARLY` of its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from compress.kernels import llvm
from compress.version import __version__

TURNS = 7  # the least of them counts, because other programs only ever add to a time
TURN = 200_000  # [ns] that a turn takes at least
CLEARLY = 0.93
FINEST = 1e-5  # [s] that a clock may be coarse by

Candidates = Mapping[str, Callable[[], object]]

_answers: dict[tuple[str, ...], str] = {}  # of this process, by the question and the candidates


def fastest(question: str, candidates: Candidates) -> str:
    """Return the name of the fastest candidate, measured once for a machine.

    `question` names what is chosen, with the sizes and types that the answer depends on. Candidates do the same work
    and are run some tens of times, so that a tenth of a millisecond each is enough; the first run of each is not
    counted, so that it may compile or allocate. They run with one thread, in a thread of their own: neither gradients
    nor modes of torch of the caller reach them. An error of a candidate is one of the caller.
    """
    asked, first = (question, *candidates), next(iter(candidates))
    if (answer := _answers.get(asked)) is not None:
        return answer
    if not _can_measure():
        return first
    key = _key(asked)
    answer = _load(key, candidates) or _keep(key, choose(candidates), candidates) or first
    return _answers.setdefault(asked, answer)


def forget() -> None:
    """Ask anew from now on: what is kept on disk is read again."""
    _answers.clear()


def choose(candidates: Candidates) -> str:
    """Return the fastest candidate: the first one, unless another is clearly faster."""
    spent = times(candidates)
    first = next(iter(candidates))
    best = min(spent, key=spent.__getitem__)
    return best if spent[best] < CLEARLY * spent[first] else first


def times(candidates: Candidates) -> dict[str, float]:
    """Return the nanoseconds of one thread's CPU time that each candidate takes, the least of `TURNS` in turns."""

    def work() -> dict[str, float]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                return _take_turns(candidates)
        finally:
            torch.set_num_threads(threads)  # what threads that are still to come begin with

    with ThreadPoolExecutor(1, thread_name_prefix="compress-measured") as pool:
        return pool.submit(work).result()


def _take_turns(candidates: Candidates) -> dict[str, float]:
    is_fine = time.get_clock_info("thread_time").resolution < FINEST
    clock = time.thread_time_ns if is_fine else time.perf_counter_ns
    counts = {}
    for name, run in candidates.items():
        run()
        begin = clock()
        run()
        counts[name] = 1 + TURN // max(1, clock() - begin)
    spent = dict.fromkeys(candidates, float("inf"))
    for _ in range(TURNS):
        for name, run in candidates.items():
            begin = clock()
            for _ in range(counts[name]):
                run()
            spent[name] = min(spent[name], (clock() - begin) / counts[name])
    return spent


def _can_measure() -> bool:
    """Return whether times mean something here: code is compiled, and tensors are plain ones with elements."""
    if not llvm.available() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return type(torch.empty(0, device="cpu")) is torch.Tensor


def _key(asked: tuple[str, ...]) -> bytes:
    torch_has = (torch.__version__, torch.backends.cpu.get_cpu_capability())  # which can be set to less than there is
    return llvm.key("\n".join(("fastest", *asked, *torch_has, __version__)))


def _load(key: bytes, candidates: Candidates) -> str | None:
    """Return the answer on disk, None if there is none of these names that can be trusted."""
    content = llvm.load_object(key)
    answer = "" if content is None else content.decode(errors="replace")
    return answer if answer in candidates else None


def _keep(key: bytes, answer: str, candidates: Candidates) -> str | None:
    """Return the answer that is kept from now on, another process's if that was first; None: it cannot be kept."""
    for over in (False, True):  # a file that cannot be trusted is replaced
        llvm.store_object(key, answer.encode(), over)
        if (kept := _load(key, candidates)) is not None:
            return kept
    return None

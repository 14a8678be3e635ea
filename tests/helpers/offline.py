"""Triton kernels compiled without a GPU, and what their machine code costs.

    case = Case("compress.kernels.triton._int", "multiply", {"x": "*fp16", ...}, {"BITS": 4, ...}, arch=90, warps=4)
    for built in compile_cases([case]):
        built.loop_count / weights  # instructions of the inner loop

Cases are compiled by copies of one process that does not interpret kernels, whatever the process of the tests does;
this file is that program too. ptxas and nvdisasm are those of the triton wheel.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
LABEL = re.compile(r"\s*\.(L_x?_?\d+):")
TARGET = re.compile(r"\.(L_x?_?\d+)")


@dataclass(frozen=True)
class Case:
    """One kernel in one configuration.

    `signature` gives the triton type of every argument that is not a constant ("*fp16", "i32"), `constants` the
    constexprs, as JSON can hold them. Pointers and the integers in `aligned` are taken to be multiples of 16.
    """

    module: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any]
    arch: int = 90  # 80, 90, 100
    warps: int = 4
    stages: int = 3
    aligned: tuple[str, ...] = ()


@dataclass(frozen=True)
class Built:
    """`loop` counts the opcodes of the inner loop (`inner_loop`), all of them if there is none; of one thread."""

    registers: int
    spills: int  # bytes of local memory: spills and stack
    shared: int  # bytes of shared memory
    loop: dict[str, int]  # opcode without modifiers -> number
    opcodes: dict[str, int]  # of the whole kernel, with modifiers
    sass: str = field(repr=False)

    @property
    def loop_count(self) -> int:
        return sum(self.loop.values())


def compile_cases(cases: list[Case], builder: str = __name__) -> list[Built]:
    """Compile by `build` of a module; what it raises is a RuntimeError with the last lines."""
    compiler = _compiler()
    assert compiler.stdin is not None and compiler.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        asked = {"builder": builder, "cases": [dataclasses.asdict(case) for case in cases]}
        compiler.stdin.write(json.dumps({**asked, "out": str(out), "err": str(err)}) + "\n")
        compiler.stdin.flush()
        if int(compiler.stdout.readline()):
            raise RuntimeError("offline compilation failed:\n" + "\n".join(err.read_text().splitlines()[-60:]))
        return [Built(**values) for values in json.loads(out.read_text())]


@functools.cache
def _compiler() -> subprocess.Popen[str]:
    """Start the process that compiles, once for all tests of this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in [str(ROOT), *sys.path] if path)
    process = subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.communicate)  # the end of its input is its end
    return process


def _serve() -> None:
    """Answer each request, a line of JSON, by a copy of this process; print the exit code of the copy."""
    import triton  # noqa: F401 (for all copies)
    from triton.compiler import ASTSource  # noqa: F401

    for line in sys.stdin:
        copy = os.fork()
        if copy == 0:
            _answer(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]), flush=True)


def _answer(builder: str, cases: list[dict[str, Any]], out: str, err: str) -> None:
    for number, path in ((0, os.devnull), (1, err), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    code = 1
    try:
        make = importlib.import_module(builder).build
        Path(out).write_text(json.dumps([dataclasses.asdict(make(Case(**values))) for values in cases]))
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def instructions(sass: str) -> Iterator[tuple[int, str, str, tuple[str, ...]]]:
    """(address, opcode, operands, labels that stand before it) of each instruction of nvdisasm's listing."""
    labels: list[str] = []
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels.append(label.group(1))
        elif found := INSTRUCTION.search(line):
            yield int(found.group(1), 16), found.group(2), found.group(3), tuple(labels)
            labels = []


def inner_loop(sass: str) -> Counter[str]:
    """Opcodes without modifiers of the first loop that copies ahead (LDGSTS), the longest loop where none does."""
    code = list(instructions(sass))
    at = {label: address for address, _, _, labels in code for label in labels}
    loops = []
    for address, opcode, operands, _ in code:
        target = TARGET.search(operands) if opcode.startswith("BRA") else None
        if target and at.get(target.group(1), address) < address:
            loops.append((at[target.group(1)], address))
    found = [Counter(op.split(".")[0] for a, op, _, _ in code if first <= a <= last) for first, last in loops]
    everything = Counter(op.split(".")[0] for _, op, _, _ in code)
    ahead = [loop for loop in found if loop["LDGSTS"]]
    return ahead[0] if ahead else max(found, key=Counter.total, default=everything)


def build(case: Case) -> Built:
    """Compile in this process, which must not interpret kernels."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(case.module), case.kernel)
    names = kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.signature[name] for name in names}
    constants = {(i,): case.constants[name] for i, name in enumerate(names) if name in case.constants}
    divisible = [["tt.divisibility", 16]]
    attributes = {
        (i,): divisible for i, name in enumerate(names) if signature[name].startswith("*") or name in case.aligned
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", case.arch, 32), options=options)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        sass = _output(tools / "nvdisasm", "-c", file.name)
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
    resources = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    opcodes = Counter(opcode for _, opcode, _, _ in instructions(sass))
    return Built(
        registers=resources["REG"],
        spills=resources["STACK"] + resources["LOCAL"],
        shared=compiled.metadata.shared,
        loop=dict(inner_loop(sass)),
        opcodes=dict(opcodes),
        sass=sass,
    )


def _output(*command: str | Path) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True, timeout=600).stdout


if __name__ == "__main__":
    _serve()

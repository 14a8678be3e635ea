"""Object code on disk: found again by other processes, and never trusted without reason."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compress.kernels import llvm
from compress.kernels.cpu.emitter import Emitter

needs_compiler = pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here")
KEY, OTHER, CODE = llvm.object_key(["a"]), llvm.object_key(["b"]), bytes(range(256)) * 9


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    name = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    monkeypatch.setenv(name, str(tmp_path))
    return tmp_path / "compress" / "kernels"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with every function that is compiled."""
    found: list[None] = []
    optimize = llvm._optimize
    monkeypatch.setattr(llvm, "_optimize", lambda *given: (found.append(None), optimize(*given))[1])
    return found


def adder(number: int = 5) -> Callable[[int], int]:
    """Compiled or loaded anew: x -> x + number."""
    emitter = Emitter("add", 1, 1)
    emitter.store(emitter.b.add(emitter.integers[0], emitter.i64(number)), emitter.pointers[0], emitter.i64(0))
    emitter.b.ret_void()
    function, place = llvm.compiled(emitter), ctypes.c_int64()
    return lambda x: (function(ctypes.addressof(place), x), place.value)[1]


def path_of(folder: Path, key: bytes = KEY) -> Path:
    return folder / (key.hex() + llvm.SUFFIX)


# ---------------------------------------------------------------- functions


@needs_compiler
def test_what_was_compiled_once_is_loaded(compilations: list[None], folder: Path) -> None:
    assert adder()(37) == 42 and len(compilations) == 1
    assert adder()(37) == 42 and len(compilations) == 1
    assert adder(6)(37) == 43 and len(compilations) == 2
    assert len(list(folder.iterdir())) == 2


@needs_compiler
def test_another_process_loads_it(compilations: list[None]) -> None:
    assert adder()(37) == 42
    here = Path(__file__).parent
    code = "import test_jit_cache as t; t.llvm._optimize = None; print(t.adder()(37))"  # compiling would raise
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder) for folder in (here, here.parent, here.parents[1]))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "42"


@needs_compiler
def test_code_for_another_processor_is_not_found(compilations: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, flags = llvm._processor()
    adder()
    for other in ((cpu, flags + ",-mmx"), (cpu + "-", flags)):
        monkeypatch.setattr(llvm, "_processor", lambda other=other: other)
        key = llvm.key("source")
        monkeypatch.setattr(llvm, "_processor", lambda: (cpu, flags))
        assert key != llvm.key("source")
    for name, value in (("llvm_version", lambda: (1, 2)), ("OPTIMIZED", {"opt": 2}), ("PASSES", {"speed_level": 1})):
        known = llvm.key("source")
        monkeypatch.setattr(llvm, name, value)
        assert llvm.key("source") != known


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "foreign"])
def test_a_file_that_is_not_what_was_stored_is_replaced(damage: str, compilations: list[None], folder: Path) -> None:
    adder()
    (path,) = folder.iterdir()
    right = path.read_bytes()
    wrong = {"cut": right[:-5], "empty": b"", "flipped": right[:-9] + bytes([right[-9] ^ 1]) + right[-8:]}
    if damage == "foreign":
        adder(6)
        (other,) = set(folder.iterdir()) - {path}
        wrong["foreign"], compilations[:] = other.read_bytes(), [None]
    path.write_bytes(wrong[damage])
    assert adder()(37) == 42 and len(compilations) == 2
    assert path.read_bytes() == right
    assert adder()(37) == 42 and len(compilations) == 2


@needs_compiler
def test_without_a_folder_functions_are_compiled(
    compilations: list[None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compress").write_text("not a folder")
    assert [adder()(37), adder()(37)] == [42, 42] and len(compilations) == 2
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert adder()(37) == 42 and len(compilations) == 3


# ---------------------------------------------------------------- files


def test_what_is_stored_is_loaded(folder: Path) -> None:
    assert llvm.load_object(KEY) is None
    llvm.store_object(KEY, CODE)
    assert llvm.load_object(KEY) == CODE and llvm.load_object(OTHER) is None
    assert [path.name for path in folder.iterdir()] == [path_of(folder).name], "no temporary file is left"


def test_keys_tell_texts_apart() -> None:
    texts = [["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], ["c", "ab"]]
    assert len({llvm.object_key(parts) for parts in texts}) == len(texts)


def test_a_file_under_another_name_is_ignored(folder: Path) -> None:
    llvm.store_object(KEY, CODE)
    path_of(folder).rename(path_of(folder, OTHER))
    assert llvm.load_object(OTHER) is None


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners of files")
def test_what_others_may_write_is_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llvm.store_object(KEY, CODE)
    assert folder.stat().st_mode & 0o777 == 0o700 and path_of(folder).stat().st_mode & 0o777 == 0o600
    for path, rights in ((path_of(folder), 0o600), (folder, 0o700)):
        for more in (0o020, 0o002):
            path.chmod(rights | more)
            assert llvm.load_object(KEY) is None
        path.chmod(rights)
        assert llvm.load_object(KEY) == CODE
    folder.chmod(0o777)
    llvm.store_object(OTHER, CODE)
    assert not path_of(folder, OTHER).exists()
    folder.chmod(0o700)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert llvm.load_object(KEY) is None


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="links are followed")
def test_links_are_ignored(folder: Path, tmp_path: Path) -> None:
    llvm.store_object(KEY, CODE)
    path_of(folder).rename(tmp_path / "elsewhere")
    path_of(folder).symlink_to(tmp_path / "elsewhere")
    assert llvm.load_object(KEY) is None


def test_a_folder_that_is_not_absolute_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("LOCALAPPDATA", "somewhere")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    folder = llvm._folder()
    assert folder is not None and folder.is_relative_to(tmp_path / "home")


def test_the_oldest_files_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [llvm.object_key([str(i)]) for i in range(6)]
    for i, key in enumerate(keys[:5]):
        llvm.store_object(key, CODE)
        os.utime(path_of(folder, key), ns=(i, i))
    size = path_of(folder, keys[0]).stat().st_size
    assert llvm.load_object(keys[1]) == CODE  # which is as good as new
    monkeypatch.setattr(llvm, "LIMIT", 3 * size)
    llvm.store_object(keys[5], CODE)
    assert [i for i, key in enumerate(keys) if llvm.load_object(key)] == [1, 4, 5]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collections_are_as_before_afterwards(is_enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with pytest.raises(KeyError), llvm.without_collections():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if before else gc.disable)()

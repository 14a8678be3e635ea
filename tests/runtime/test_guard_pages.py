"""Compiled code beside memory that may not be read: no signal for tensors that pass the checks."""

from __future__ import annotations

import signal

import pytest

from helpers import guard_pages


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("weights", "multiplied with affine codebook e8p grid int kquant lattice nf sparse ternary trellis\n"),
        ("cache", "read the cache by "),
        ("refused", "refused: kv_cache: layer 0, keys: pca is calibrated, but mean is float16 [2, 1], expected "),
    ],
)
def test_what_is_checked_is_not_read_past_its_end(what: str, said: str) -> None:
    done = guard_pages.run(what)
    assert done.code == 0, done.err[-2000:]
    assert done.out.startswith(said)


def test_the_page_is_in_the_way() -> None:
    """Of a mean that is too short, which the check would refuse."""
    done = guard_pages.run("unchecked")
    if "plain code" in done.out or "RuntimeError" in done.err:
        pytest.skip("no compiled code on this processor")
    assert done.code == -signal.SIGSEGV, done.err[-2000:]

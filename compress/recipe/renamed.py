"""Accept former names of estimators in recipes."""

from __future__ import annotations

import functools
import sys

from yaml import ScalarNode

from compress.recipe.yaml import Entries

ESTIMATORS = {"swap": "kl_one_at_a_time", "swap_base": "kl_one_at_a_time_from_base"}  # former name -> name
KEYS = ("estimator", "scale", "cache_estimator")


def current(entries: Entries) -> Entries:
    """Return the settings of an allocation with the names of today; each former name gets one line on stderr."""
    renamed = dict(entries)
    for key in KEYS:
        at, node = entries.get(key, (None, None))
        if at is not None and isinstance(node, ScalarNode) and node.value in ESTIMATORS:
            _tell(f"allocate: {key}: {node.value} is called {ESTIMATORS[node.value]} now")
            renamed[key] = (at, ScalarNode(node.tag, ESTIMATORS[node.value], node.start_mark, node.end_mark))
    return renamed


@functools.cache
def _tell(line: str) -> None:
    """Print a line on stderr, once in a process."""
    print(line, file=sys.stderr)

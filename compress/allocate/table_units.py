"""Make units of an allocation from the tables outside of the blocks: token embeddings, output head, or one for both.

A table has options of its own (`allocate.tables` of a recipe), numbered behind those of linears. Its damage is the KL
of the whole model with this table alone at the option, in nats a token, whatever the damages of linears are measured
by. The recipe allows only estimators in that unit (compress/recipe/allocation.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from compress.allocate.prepare_options import Options
from compress.allocate.problem import Entry, Unit
from compress.run.table_plan import TableOptions

TABLE_KL: Final = "table_kl"  # the damage of tables, under its own name; they have it under all others, too


def units(opened: Options, kls: Mapping[str, Sequence[float]], estimators: Iterable[str]) -> list[Unit]:
    """Return a unit for each open table; kls: table -> by option of tables, {} where nothing is measured."""
    estimators, block = [*estimators, TABLE_KL], len(opened.prepared.skeleton.blocks)
    made = []
    for table in opened.tables:
        entries = []
        for number, nbytes in sizes(opened, table).items():
            damage = dict.fromkeys(estimators, kls[table.spec.name][number]) if table.spec.name in kls else {}
            entries.append(Entry(opened.table_names[number], nbytes, 8 * nbytes / table.spec.numel, damage))
        entries.sort(key=lambda entry: entry.nbytes)
        name = table.spec.name
        made.append(Unit(name, (name,), block, table.spec.numel, tuple(entries), is_table=True))
    return made


def sizes(opened: Options, table: TableOptions) -> dict[int, int]:
    """Return number of an option of tables -> exact bytes of this table, at those that it can have."""
    found = {number: layer.nbytes for number, layer in table.layers.items()}
    kept = [number for number, option in enumerate(opened.allocation.tables) if option is None]
    return found | dict.fromkeys(kept, sum(table.sources.values()))

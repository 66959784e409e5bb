"""The examples that a run measures: those of its shard that a cell lacks."""

from types import SimpleNamespace

from kvbench.base.example import Example
from kvbench.plan.cells import Group, pending, rounds, select_shard
from kvbench.store.cell import Cell

EXAMPLES = tuple(Example(f"e{number}", "p", ("a",), 5) for number in range(40))


def test_each_example_is_measured_by_one_shard():
    shards = [select_shard(EXAMPLES, SimpleNamespace(shards=3, shard=shard)) for shard in range(3)]
    assert all(len(shard) > 4 for shard in shards)
    measured = [example.id for shard in shards for example in shard]
    assert sorted(measured) == sorted(example.id for example in EXAMPLES)


def test_an_example_is_pending_for_the_cells_that_lack_it():
    first, second = (Cell({"name": name}, None, name, None, "task") for name in ("first", "second"))
    stored = {first.id: {"e0": {}, "e1": {}}, second.id: {"e1": {}}}
    group = Group(SimpleNamespace(), "task", (first, second), EXAMPLES[:3])
    todo = pending(group, SimpleNamespace(lines=lambda cell_id: stored[cell_id]))
    assert todo == {"e0": [second], "e2": [first, second]}


def test_kvbenchs_own_methods_are_measured_before_others():
    chains = {"mine": True, "snapkv": False, "yours": True, "h2o": False}
    cells = [Cell({"name": n}, SimpleNamespace(foreign=f), n, None, "task") for n, f in chains.items()]
    both = Group(SimpleNamespace(), "both", tuple(cells), EXAMPLES[:3])
    own = Group(SimpleNamespace(), "own", tuple(cells[1::2]), EXAMPLES[:3])
    ordered = [[[cell.label for cell in group.cells] for group in groups] for groups in rounds([both, own])]
    assert ordered == [[["snapkv", "h2o"], ["snapkv", "h2o"]], [["mine", "yours"]]]
    assert len(rounds([own])) == 1

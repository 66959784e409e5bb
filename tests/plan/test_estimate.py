"""What a group takes, counted by hand."""

from types import SimpleNamespace

from kvbench.base.example import Example
from kvbench.kv.model_shape import Shape
from kvbench.methods.core.resolve import chain_of
from kvbench.plan.cells import Group
from kvbench.plan.estimate import estimate
from kvbench.store.cell import Cell
from kvbench.store.results import Timing

SHAPE = Shape(layers=2, query_heads=4, kv_heads=2, head_dim=8)
ITEM = 4
N, NEW = 100, 10
DENSE = 2 * 2 * 2 * N * 8 * ITEM  # layers, k and v, heads


def cell(method, name):
    chain = chain_of(method)
    return Cell({"name": name}, chain, name, SimpleNamespace(examples=()), "task")


def made(*methods, rows=48, samples=None, turns="", drawn=1):
    cells = tuple(cell(m, str(i)) for i, m in enumerate(methods))
    examples = tuple(Example(str(i), "x" * i, ("a",), NEW) for i in range(4))
    group = Group(SimpleNamespace(examples=examples, turns=turns, samples=drawn), "task", cells, examples)
    todo = {e.id: list(cells) for e in examples}
    inputs = {c.id: (samples or {}).get(c.label, {}) for c in cells}
    # the longest prompt has 100 tokens, each shorter one 1 fewer
    return group, estimate(group, todo, inputs, SHAPE, ITEM, 32, rows, lambda e: N - 3 + len(e.prompt))


def test_bytes_of_a_cell_are_cache_and_copy_and_tail():
    group, actual = made("full", {"method": "streamingllm", "kv_size": 20})
    assert actual.prompt_tokens == N
    positions = 2 * 4 * N
    tail = DENSE * NEW // N
    assert actual.cells[group.cells[0].id] == DENSE + positions + tail
    assert actual.cells[group.cells[1].id] == (DENSE + positions) * 20 // N + tail
    assert actual.layer == DENSE // 2
    each = sum(actual.cells.values())
    # 8 answers are left: 4 prompts at once, if there is room
    assert actual.bytes(group.cells, 2**40) == actual.layer + 4 * each
    assert actual.bytes(group.cells, 2 * each) == actual.layer + 2 * each
    assert actual.bytes(group.cells, 1) == actual.layer + each


def test_a_cache_from_which_questions_or_drawn_answers_branch_stays_beside_its_copy():
    tail = DENSE * NEW // N
    for options in ({"turns": "isolated"}, {"drawn": 4}):
        group, actual = made("full", **options)
        assert actual.cells[group.cells[0].id] == 2 * (DENSE + 2 * 4 * N) + tail


def test_what_is_not_calibrated_yet_counts_as_the_full_cache():
    group, actual = made({"method": "palu"}, {"method": "snapkv+palu", "kv_size": 40})
    assert {actual.cells[c.id] for c in group.cells} == {DENSE + DENSE * NEW // N}


def test_observations_count_with_the_layer():
    snapkv = {"method": "snapkv", "kv_size": 40, "window": 16}
    assert made(snapkv)[1].layer == DENSE // 2 + 4 * 16 * 8 * ITEM
    assert made(snapkv, "h2o")[1].layer == DENSE // 2 + 4 * 16 * 8 * ITEM + 4 * N * 4


def test_cells_of_one_prefill_stay_together_where_they_fit():
    full, chai = "full", {"method": "chai"}
    group, actual = made(full, chai, full, chai)
    sizes = [actual.cells[c.id] for c in group.cells]
    keys = [c.chain.prefill_key for c in group.cells]
    assert keys[0] == keys[2] != keys[1] == keys[3]

    def parts(memory):
        return [[c.label for c in p.cells] for p in actual.parts(group, memory + actual.layer)]

    assert parts(sum(sizes)) == [["0", "2", "1", "3"]]
    # one too few for all: the second prefill goes on its own
    assert parts(sum(sizes) - 1) == [["0", "2"], ["1", "3"]]
    assert parts(1) == [["0"], ["2"], ["1"], ["3"]]


def test_time_is_that_of_the_samples_there_and_unknown_without():
    assert made("full")[1].seconds is None
    timing = SimpleNamespace(timing=Timing(prefill_s=2.0, compress_s=0.5, decode_s=1.5))
    _, actual = made("full", "think", samples={"0": {"x": timing}})
    # 4 prefills of 2 s; 8 answers of 0.5 + 1.5 s, those of the other method as long
    assert actual.seconds == 4 * 2.0 + 8 * 2.0

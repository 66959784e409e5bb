"""The lock of a suite: a sentence for each difference, without a plan or a model."""

from types import SimpleNamespace

import pytest

from kvbench.suite import lock

TASK = {"protocol": "p", "prompts": {"e0": "h0"}}


@pytest.mark.parametrize(
    ("planned", "problems"),
    [
        ({"a": {"t": TASK}}, []),
        ({"a": {"t": TASK}, "b": {"t": TASK}}, ["b: t is no task of the suite"]),
        ({"a": {"u": TASK}}, ["a: u is no task of the suite", "a: t is missing"]),
        ({}, ["a: t is missing"]),
        ({"b": {"t": TASK}}, ["b: t is no task of the suite", "a: t is missing"]),
        ({"a": {"t": {**TASK, "protocol": "q"}}}, ["a: t is asked or scored in another way"]),
    ],
)
def test_each_difference_from_the_lock_is_a_sentence(planned, problems, monkeypatch):
    locked = {"suite": "s", "checkpoint": "c", "editions": {"quick": {"a": {"t": TASK}}}}
    monkeypatch.setattr(lock, "read_lock", lambda suite: locked)
    plan = SimpleNamespace(source=SimpleNamespace(fingerprint="c"))
    suite = SimpleNamespace(model="tiny", edition="quick")
    assert lock.list_differences(suite, SimpleNamespace(plans=[plan]), planned) == problems

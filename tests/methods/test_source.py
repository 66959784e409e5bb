"""What lists say of a method is read from its source, and is what the method itself would say."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from support import worked
from support.law_matrix import METHODS

import kvbench.methods
from kvbench.base.errors import UsageError
from kvbench.methods.core import loading, registry
from kvbench.methods.core.source import UNDESCRIBED, describe

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
HEAD = "from dataclasses import dataclass\nfrom typing import ClassVar\n\nfrom kvbench.methods.base import Selector\n\n"
MINE = '@dataclass(frozen=True, kw_only=True)\nclass Mine(Selector):\n    id = "mine"\n    wide: int = 3\n'


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes files of methods where kvbench finds them, and describes the method ``mine`` of the first."""
    monkeypatch.setattr(kvbench.methods, "__path__", [*kvbench.methods.__path__, str(tmp_path)])

    def write(code, **others):
        for name, text in {"mine": code, **others}.items():
            (tmp_path / f"{name}.py").write_text(text)
        return describe(tmp_path / "mine.py", "mine")

    return write


@pytest.mark.parametrize("method", METHODS)
def test_knobs_of_the_source_are_those_of_the_class(method):
    module = registry.defaults(method)["_target_"].rpartition(".")[0]
    path = Path(import_module(module).__file__)
    about, knobs = describe(path, method)
    entry = loading.read_class_entry(path, method)
    del entry["_target_"]
    assert knobs == entry and about != UNDESCRIBED


@pytest.mark.parametrize(
    ("code", "about"),
    [
        (f'"""Mine: the last tokens.\n\nMore of it.\n"""\n\n{HEAD}{MINE}', "Mine: the last tokens."),
        (HEAD + MINE.replace("    id", '    """Keep the last.\n\n    And more."""\n\n    id'), "Keep the last."),
        (HEAD + MINE, UNDESCRIBED),
        ('""" """\n' + HEAD + MINE, UNDESCRIBED),
    ],
    ids=["of the file", "of the class", "none", "empty"],
)
def test_a_method_is_described_by_its_docstring(code, about, written):
    assert written(code).about == about


def test_a_file_of_two_methods_describes_each_by_its_class(written):
    other = MINE.replace("Mine", "Other").replace('"mine"', '"other"')
    one, two = (text.replace("    id", f'    """{doc}"""\n    id') for text, doc in ((MINE, "One."), (other, "Two.")))
    assert written(f'"""Two methods."""\n{HEAD}{one}\n{two}').about == "One."


def test_the_methods_of_the_pages_are_described(written):
    strided = README.split("`my_methods/strided.py`")[1].split("```python\n")[1].split("```")[0]
    described = written(strided.replace('"strided"', '"mine"'))
    assert described.about == "Keep tokens at even distances, and the last ``window`` tokens."
    assert described.knobs["window"] == 8 and described.knobs["kv_ratio"] == 0.25
    towards = written(worked.block("kvbench/methods/towards.py").replace('"towards"', '"mine"'))
    assert towards.about.startswith("Keep the tokens whose keys point away") and towards.knobs["recent"] == 0


def test_knobs_come_from_all_classes_that_it_derives_from(written):
    base = HEAD + MINE.replace("Mine", "Base").replace(
        '    id = "mine"\n', "    note: ClassVar[str] = ''\n    deep: int = 1\n"
    )
    code = f"from .base_of_mine import Base as Below\n{HEAD}LEAST = 7\n\n{MINE}".replace("(Selector)", "(Below)")
    code += "    wide: int = LEAST\n    spread: float = LEAST / 2\n    where: tuple[int, ...] = (1, 2)\n"
    code += "    rule: int = knob(5, at_least(1))\n    inner: int = field(default=0, metadata={'knob': False})\n"
    knobs = written(code, base_of_mine=base).knobs
    own = {"wide": 7, "deep": 1, "spread": "LEAST / 2", "where": [1, 2], "rule": 5}
    assert knobs.items() >= own.items()


def test_a_class_may_have_the_name_of_the_one_that_it_derives_from(written):
    named = f"from kvbench.methods.snapkv import SnapKV\n{HEAD}{MINE}".replace(
        "class Mine(Selector)", "class SnapKV(SnapKV)"
    )
    assert written(named).knobs["window"] == 32
    circle = "from kvbench.methods.{} import Round\n"
    with pytest.raises(UsageError, match="derive from each other in a circle"):
        written(circle.format("b") + MINE.replace("Selector", "Round"), a=circle.format("b"), b=circle.format("a"))


@pytest.mark.parametrize(("code", "why"), [("def f(:\n", "mine.py:1: SyntaxError"), ("x = 1\n", "no class at its top")])
def test_a_file_that_says_nothing_is_told(code, why, written):
    with pytest.raises(UsageError, match=why):
        written(code)


@pytest.mark.e2e("runs whole command lines")
def test_lists_and_help_do_not_run_a_method_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(f'"""Mine: the last."""\n{HEAD}{MINE}\nraise SystemExit("run")\n')
    monkeypatch.setenv("KVBENCH_METHODS", str(tmp_path))
    for arguments in (["list", "methods"], ["--help"]):
        done = subprocess.run([sys.executable, "-m", "kvbench", *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert ("Mine: the last" in done.stdout) == (arguments[0] == "list")

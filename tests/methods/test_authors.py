"""Slips of a method's author are told with file and line, and stop nothing else."""

import json
import shutil
import sys

import pytest

import kvbench.methods
from kvbench.base import conf as configs
from kvbench.base.conf import conf_dir
from kvbench.bench import memory_table
from kvbench.cli import list as listing
from kvbench.cli.main import main
from kvbench.methods.core import registry
from kvbench.methods.core.resolve import chain_of

pytestmark = pytest.mark.e2e("runs methods with slips of their authors")

CODE = """from dataclasses import dataclass
from kvbench.methods.core.base import Selector
from kvbench.methods.core.stage import Stage

@dataclass(frozen=True, kw_only=True)
class Mine(Selector):
    id = "mine"
    wide: int = 3
"""
YAML = "mine:\n  _target_: mine_method.Mine\n  kv_size: null\n  wide: 3\n"
SLIPS = {
    "wrong module": (CODE, YAML.replace("mine_method", "mine_metod"), "mine.yaml:2", "No module named 'mine_metod'"),
    "wrong class": (CODE, YAML.replace("Mine", "Main"), "mine.yaml:2", "has no attribute 'Main'"),
    "no class": (CODE, YAML.replace("mine_method.Mine", "mine"), "mine.yaml:2", "_target_ mine cannot be imported"),
    "no stage": (CODE, YAML.replace("Mine", "dataclass"), "mine.yaml:2", "is no class of a method"),
    "no id": (CODE.replace("    id =", "    name ="), YAML, "mine_method.py:5", "write id = 'mine'"),
    "another id": (CODE.replace('"mine"', '"snapkv"'), YAML, "mine_method.py:5", "has id 'snapkv': write id = 'mine'"),
    "no role": (CODE.replace("(Selector)", "(Stage)"), YAML, "mine_method.py:5", "derive it from Selector"),
    "syntax": (CODE + "def scores(self:\n", YAML, "mine_method.py:9", "SyntaxError"),
    "import": (
        CODE + "import nowhere_to_be_found\n",
        YAML,
        "mine_method.py:9",
        "No module named 'nowhere_to_be_found'",
    ),
    "not frozen": (CODE.replace("frozen=True, ", ""), YAML, "mine_method.py:5", "frozen"),
    "fails at import": (CODE + "1 / 0\n", YAML, "mine_method.py:9", "ZeroDivisionError"),
    "no such knob": (CODE, YAML + "  narrow: 1\n", "mine_method.py:5", "unexpected keyword argument 'narrow'"),
    "needs without n": (CODE + "    def needs(self):\n        return 1\n", YAML, "mine_method.py:5", "Mine.needs(n)"),
    "no needs": (
        CODE + "    def needs(self, n):\n        return None\n",
        YAML,
        "mine_method.py:5",
        "is None: return Needs",
    ),
    "needs fail": (CODE + "    def needs(self, n):\n        1 / 0\n", YAML, "mine_method.py:10", "ZeroDivisionError"),
    "fails when made": (CODE + "    def check(self):\n        1 / 0\n", YAML, "mine_method.py:10", "ZeroDivisionError"),
    "no role of ours": (CODE + "    role = 5\n", YAML, "mine_method.py:5", "has role 5: derive it from Selector"),
    "no hash": (CODE + "    def __hash__(self):\n        1 / 0\n", YAML, "mine_method.py:10", "ZeroDivisionError"),
    "identity fails": (
        CODE + "    def identity(self):\n        1 / 0\n",
        YAML,
        "mine_method.py:10",
        "method mine cannot say what it is",
    ),
    "empty": (CODE, "", "mine.yaml:1", "write mine: {_target_: package.module.Class"),
    "no target": (CODE, "mine:\n  wide: 3\n", "mine.yaml:1", "write mine: {_target_: package.module.Class"),
    "a list": (CODE, "- mine\n", "mine.yaml:1", "holds no mapping"),
    "broken": (CODE, YAML + "  wide: [1\n", "mine.yaml:6", "is not YAML"),
    "not UTF-8": (CODE, YAML.encode() + b"  # \xe9\n", "mine.yaml:5", "is not UTF-8: byte 0xe9"),
}
CACHES = registry.available, registry.defaults, configs.entries


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a method's two files where kvbench finds them."""
    conf = shutil.copytree(conf_dir(), tmp_path / "conf")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in (registry, configs, listing):
        monkeypatch.setattr(module, "conf_dir", lambda: conf)

    def write(code, yaml):
        (tmp_path / "mine_method.py").write_text(code)
        (conf / "method" / "mine.yaml").write_bytes(yaml if isinstance(yaml, bytes) else yaml.encode())
        for known in CACHES:
            known.cache_clear()
        sys.modules.pop("mine_method", None)

    yield write
    sys.modules.pop("mine_method", None)
    for known in CACHES:
        known.cache_clear()


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_of_an_author_is_told_with_file_and_line_and_costs_no_other_method(slip, written, capsys):
    code, yaml, place, why = SLIPS[slip]
    written(code, yaml)
    assert main(["run", "method=mine", "--plan"]) == 2
    err = capsys.readouterr().err
    assert place in err and why in err and "internal error" not in err and "Traceback" not in err
    assert main(["list", "methods", "--json"]) == 0
    listed = {item["id"]: item["about"] for item in json.loads(capsys.readouterr().out)["methods"]}
    assert listed["snapkv"].startswith("SnapKV") and "mine" in listed
    if place.startswith("mine.yaml") and "_target_ " not in err:
        assert listed["mine"].startswith("cannot be used: ") and place in listed["mine"]


def test_a_method_that_cannot_be_made_is_left_out_of_what_all_cost(written, capsys):
    written(CODE + "1 / 0\n", YAML)
    names = memory_table.list_default_methods()
    assert "snapkv" in names and "mine" not in names
    assert "mine_method.py:9: ZeroDivisionError" in capsys.readouterr().err


def test_other_methods_run_beside_a_broken_file(written, capsys, tmp_path):
    written(CODE, YAML + "  wide: [1\n")
    assert main(["run", "method=snapkv", "dataset=tiny/needle", "limit=1", "--plan", f"results={tmp_path / 'r'}"]) == 0


def test_an_unbroken_method_of_ones_own_is_found(written, capsys, tmp_path):
    written(CODE, YAML)
    assert chain_of({"method": "mine", "wide": 5}).stages[0].wide == 5


ALONE = """\"\"\"Mine: the last tokens.\"\"\"

from dataclasses import dataclass

import torch

from kvbench.methods.core.base import Selector


@dataclass(frozen=True, kw_only=True)
class Mine(Selector):
    id = "mine"

    wide: int = 3
    frozen_layers: tuple[int, ...] = (0,)

    def scores(self, cache, obs, capacity):
        return torch.arange(obs.n, dtype=torch.float32).expand(cache.heads, -1)
"""


@pytest.fixture
def file_alone(tmp_path, monkeypatch):
    """Writes a method that is a file of kvbench/methods, without a YAML file."""
    monkeypatch.setattr(kvbench.methods, "__path__", [*kvbench.methods.__path__, str(tmp_path)])

    def write(code):
        (tmp_path / "mine.py").write_text(code)
        registry.forget_files()

    yield write
    sys.modules.pop("kvbench.methods.mine", None)
    monkeypatch.undo()
    registry.forget_files()


def test_a_method_is_one_file_with_the_knobs_of_its_class(file_alone, capsys):
    file_alone(ALONE)
    assert registry.defaults("mine")["frozen_layers"] == [0] and registry.defaults("mine")["wide"] == 3
    assert chain_of({"method": "mine+think", "wide": 5}).stages[0].wide == 5
    assert main(["run", "method=mine", "kv_size=40,64", "wide=4", "dataset=tiny/needle", "limit=1", "--plan"]) == 0
    assert "mine kv_size=64 wide=4" in capsys.readouterr().out
    assert main(["run", "method=mine", "wide=x", "--plan"]) == 2
    assert "method.mine.wide='x' is not possible: a whole number" in capsys.readouterr().err
    assert main(["list", "methods", "--json"]) == 0
    (listed,) = (m for m in json.loads(capsys.readouterr().out)["methods"] if m["id"] == "mine")
    assert listed["about"] == "Mine: the last tokens." and listed["knobs"]["wide"] == 3


@pytest.mark.parametrize("line", ["id='mine'", "id: str = 'mine'", 'id:ClassVar[str]="mine"'])
def test_an_id_is_found_however_it_is_written(line, file_alone):
    file_alone(
        ALONE.replace('id = "mine"', line).replace("import dataclass", "import dataclass\nfrom typing import ClassVar")
    )
    assert "mine" in registry.available() and registry.defaults("mine")["wide"] == 3


def test_a_file_without_an_id_is_named_where_a_method_is_unknown(file_alone, capsys):
    file_alone(ALONE.replace("id = ", "name = "))
    assert main(["run", "method=mine", "--plan"]) == 2
    err = capsys.readouterr().err
    assert "unknown method mine" in err and 'No class with a line id = "..." is in ' in err and "mine.py." in err


def test_slips_in_the_file_of_such_a_method_are_told_with_its_line(file_alone, capsys):
    file_alone(ALONE + "\n1 / 0\n")
    assert main(["run", "method=mine", "--plan"]) == 2
    err = capsys.readouterr().err
    assert "mine.py:20: ZeroDivisionError" in err and "Traceback" not in err
    assert main(["run", "method=snapkv", "--plan"]) == 0


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("mine.py", b"\xff\xfe" + ALONE.encode(), "mine.py:1: SyntaxError"),
        ("mine.py", ALONE.encode() + b"\0", "mine.py:1: SyntaxError: source code string cannot contain null bytes"),
        ("snapkv.py", ALONE.encode(), "kvbench/methods/snapkv.py has the same name: rename the file"),
        ("mine.py", ALONE.replace('"mine"', '"h2o"').encode(), "its id 'h2o' is also that of"),
    ],
)
def test_a_file_that_cannot_be_read_costs_no_other_method(name, content, why, file_alone, tmp_path, capsys):
    file_alone(ALONE)
    (tmp_path / "mine.py").unlink()
    (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "gone.py").symlink_to("nowhere")
    assert main(["run", f"method={'h2o' if 'h2o' in why else 'mine'}", "--plan"]) == 2
    assert why in capsys.readouterr().err
    assert main(["list", "methods"]) == 0 and main(["run", "method=keynorm", "--plan"]) == 0


def test_a_method_that_cannot_be_planned_ends_the_run_with_file_and_line(file_alone, capsys, tmp_path):
    file_alone(ALONE + "\n    def capacity(self, n):\n        return 1 / 0\n")
    assert main(["run", "method=mine", "dataset=tiny/needle", "limit=1", "--plan", f"results={tmp_path / 'r'}"]) == 1
    line = (tmp_path / "mine.py").read_text().splitlines().index("        return 1 / 0") + 1
    assert f"mine.py:{line}: ZeroDivisionError: division by zero" in capsys.readouterr().err


def test_a_method_that_fails_over_a_prompt_does_not_end_the_account_of_all(file_alone, capsys):
    file_alone(ALONE.replace("torch.arange", "torch.orange"))
    assert main(["bench", "memory", "method=full,mine", "n=64"]) == 0
    captured = capsys.readouterr()
    assert "failed: AttributeError: module 'torch' has no attribute 'orange'" in captured.out
    assert "internal error" not in captured.err


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ('"high"', "scores() of mine returns str in layer 1, not a tensor [4, 256]"),
        ("None", "scores() of mine returns NoneType in layer 1, not a tensor"),
        ("torch.ones(cache.heads, obs.n) * 1j", "scores() of mine returns complex numbers in layer 1"),
        (
            "2**62 + torch.arange(obs.n).expand(cache.heads, -1)",
            "scores() of mine returns whole numbers above 16777216",
        ),
        ("torch.full((cache.heads, obs.n), -torch.inf)", "scores of mine are all infinite for a head in layer 1"),
        ("torch.arange(obs.n).expand(cache.heads, -1) + torch.inf", "scores of mine are all infinite for a head"),
    ],
)
def test_scores_that_order_no_tokens_are_refused(returned, why, file_alone, tmp_path, capsys):
    file_alone(ALONE.replace("torch.arange(obs.n, dtype=torch.float32).expand(cache.heads, -1)", returned))
    short = ["dataset=tiny/needle", "length=256", "limit=1"]
    assert main(["run", "method=mine", *short, f"results={tmp_path / 'r'}"]) == 1
    assert why in " ".join(capsys.readouterr().out.split())


def test_a_file_that_is_no_python_is_named_where_its_method_is_unknown(file_alone, capsys):
    file_alone("from dataclasses import dataclass\n\ndef scores(self:\n    return 1\n")
    assert main(["run", "method=mine", "--plan"]) == 2
    err = capsys.readouterr().err
    assert "unknown method mine" in err and "mine.py:3: SyntaxError: '(' was never closed" in err
    assert "No class with" not in err
    assert main(["list", "methods"]) == 0
    assert "mine.py:3: SyntaxError: '(' was never closed" in capsys.readouterr().err


def test_scores_of_another_shape_are_refused_by_what_is_wrong(file_alone, tmp_path, capsys):
    file_alone(ALONE.replace("torch.arange(obs.n,", "torch.arange(obs.n - 3,"))
    short = ["dataset=tiny/needle", "length=256", "limit=1"]
    assert main(["run", "method=mine", *short, f"results={tmp_path / 'r'}"]) == 1
    assert "scores() of mine returns [4, 253] in layer 1, not [4, 256]" in " ".join(capsys.readouterr().out.split())

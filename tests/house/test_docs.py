"""What the README shows must work: its method, its Python example, and its commands' names."""

import gzip
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import pytest
from packaging.specifiers import SpecifierSet
from support import processes

from kvbench.base.conf import conf_dir
from kvbench.cli.main import main
from kvbench.cli.verbs import VERBS
from kvbench.engines import verb as engines
from kvbench.kv.model_shape import Shape
from kvbench.plan import config, presets
from kvbench.plan import words as words_of
from kvbench.plan.cells import with_baseline
from kvbench.plan.config import read
from kvbench.plan.estimate import cache_bytes
from kvbench.store import archive
from kvbench.store.store import ResultStore
from kvbench.tasks.metrics import METRICS

pytestmark = pytest.mark.e2e("starts processes")

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(marker):
    """The fenced block that follows a line with ``marker``."""
    match = re.search(rf"{re.escape(marker)}[^\n]*\n+```\w*\n(.*?)```", README, re.DOTALL)
    assert match, f"README.md has no block after {marker!r}"
    return match.group(1)


def own_method(folder, *arguments):
    """Run kvbench with the methods of a folder; return the finished process."""
    return processes.run(*arguments, cwd=ROOT, env={**os.environ, "KVBENCH_METHODS": str(folder)})


def test_adding_the_readmes_method_takes_one_file_in_any_folder(tmp_path):
    code = block("`my_methods/strided.py`")
    assert len(code.strip().splitlines()) <= 25
    (tmp_path / "strided.py").write_text(code)
    small = ["kv_ratio=0.5", "dataset=tiny/needle", "length=256", "limit=2", f"results={tmp_path / 'results'}"]
    folder = os.path.relpath(tmp_path, ROOT)  # as the README has it
    done = own_method(folder, "run", "method=strided+think", *small, "--json")
    assert done.returncode == 0, done.stderr
    assert '"method": "strided+think kv_ratio=0.5 ratio=0.4"' in done.stdout
    assert '"status": "refused"' not in done.stdout


def test_a_folder_of_methods_that_is_not_there_is_named(tmp_path):
    done = own_method(tmp_path / "none", "list", "methods")
    assert done.returncode == 2 and "there is no such folder" in done.stderr and "Traceback" not in done.stderr


def test_the_readmes_python_example_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it stores its results
    exec(compile(block("## Python"), "README.md", "exec"), {"__name__": "readme"})
    out = capsys.readouterr().out
    assert "| snapkv kv_ratio=0.5 | 2.0x smaller |" in out and "| h2o kv_ratio=0.25 |" in out


@pytest.mark.parametrize("page", ["api.md", "inside.md"])
def test_the_python_of_a_page_runs(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    exec(compile("".join(blocks), page, "exec"), {"__name__": "page"})


def test_the_readmes_first_table_is_what_committed_samples_give(tmp_path, capsys):
    # the tiny suite's table of combinations has the main job's answers
    archive.unpack(ROOT / "results" / "tiny" / "tiny-chains.samples.jsonl.gz", ResultStore(tmp_path))
    assert main(["show", "method=snapkv+think", "ratio=0.4", f"results={tmp_path}"]) == 0
    out = capsys.readouterr().out
    for line in block("check that methods run, not to judge them").splitlines():
        assert line in out


def test_the_table_of_run_real_is_what_its_samples_give():
    table = (ROOT / "results" / "run-real.txt").read_text(encoding="utf-8").partition("\n\n")[2].partition("\n\n")[2]
    cells, scores = {}, defaultdict(list)
    with gzip.open(ROOT / "results" / "run-real.samples.jsonl.gz", "rt", encoding="utf-8") as lines:
        for entry in map(json.loads, lines):
            if "cell" in entry:
                cells[entry["cell"]["id"]] = entry["cell"]["label"].split()[0], entry["cell"]["column"].split("/")[1]
            else:
                scores[cells[entry["of"]]].append(entry["sample"]["score"])
    head, *rows = table.splitlines()
    tasks = head.split()
    # behind the method: mean, difference, tasks
    printed = {row.split()[0]: row.split()[1 : len(tasks) + 3] for row in reversed(rows[2:]) if row[:1].strip()}
    methods = dict.fromkeys(method for method, _ in scores)
    assert len(methods) == 5 and len(scores) == 5 * len(tasks)
    for method in methods:
        means = [100 * fmean(scores[method, task]) for task in tasks]
        mean, _, *shown = printed[method]
        assert [mean, *shown] == [f"{m:.1f}" for m in (fmean(means), *means)]


@pytest.mark.parametrize(
    ("model", "shape", "rows", "held", "decoding"),
    [
        ("llama3-8b-instruct", Shape(32, 32, 8, 128), 33, 12.8, 13.3),
        ("llama3-70b-instruct", Shape(80, 64, 8, 128), 13, 25.4, 26.0),
    ],
)
def test_the_tables_to_scale_out_have_the_rows_and_bytes_that_their_cost_is_reckoned_from(
    model, shape, rows, held, decoding
):
    text = (ROOT / "docs" / "scale-out.md").read_text(encoding="utf-8")
    (words,) = (t for t in re.findall(r'TABLE="(.*?)"', text, re.DOTALL) if f"model={model}" in t.split())
    chains = with_baseline(read(words.split()).chains, baseline=True)
    assert len(chains) == rows
    held_bytes = sum(cache_bytes(c.chain, shape, n=6400, itemsize=2) for c in chains)
    new_tokens = rows * shape.full_bytes(509_000 // 3750, 2)
    assert f"{held_bytes / 2**30:.1f}" == f"{held}"
    assert float(f"{(held_bytes + new_tokens) / 2**30:.1f}") == decoding
    assert f"{held} GiB" in text and f"{decoding} GiB" in text


@pytest.mark.parametrize(
    ("package", "room"),
    [
        ("python-dateutil", "<3"),  # botocore, by boto3 of hydra-ray-launcher
        ("joblib", "<1.6"),  # 1.6 needs a newer cloudpickle than hydra-ray-launcher takes
    ],
)
def test_the_pins_leave_room_for_what_the_extras_need(package, room):
    # a pin outside makes pip try every version of the extra's packages, for hours
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    assert pins[package] in SpecifierSet(room)


def commands():
    """Every kvbench command in a fenced block of the README and of the site's pages, without its shell parts."""
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        fences = re.findall(r"^```\w*\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        for line in "".join(fences).replace("\\\n", " ").splitlines():
            match = re.match(r"(?:\w+=\S+ )*(?:kvbench|kvbench) (.*)", line.partition("#")[0])
            if match:
                command = match[1].replace("FOLDER_OR_HUB_ID", "tiny").replace("peaks", "l2")
                # methods of one's own are not installed here
                yield re.sub("mymethod|strided|taper|pooled", "snapkv", command).split()


def test_the_commands_of_the_documentation_can_be_carried_out():
    runs = [words for words in commands() if words[0] == "run" and "$TABLE" not in words]
    assert len(runs) > 15
    for _, *words in runs:
        if any(word.startswith("engine=") for word in words):
            engines.read_request([word for word in words if "=" in word])
            continue
        requests = words_of.read([w for w in words if "=" in w], "-m" in words)
        assert requests and all(config.parse(request) for request in requests), words
    assert {words[0] for words in commands()} <= VERBS.keys()


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("results/*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_to_files_of_the_repository(page):
    """So that they work on GitHub as well as on the site."""
    for target in re.findall(r"\]\(([^()\s]+)\)", page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:|#", target):
            path, _, _ = target.partition("#")
            assert (page.parent / path).exists(), target


def test_make_targets_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE))
    assert {"run", "test"} <= named <= targets


def test_the_wheel_carries_conf_and_weights(tmp_path):
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    import zipfile

    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "kvbench/conf/config.yaml",
        "kvbench/conf/method/snapkv.yaml",
        "kvbench/models/embedded/tiny/model.safetensors",
        "kvbench/models/embedded/tiny/tokenizer.json",
        "kvbench/report/figures.mplstyle",
        "kvbench/tasks/tiny_words.yaml",
    } <= names


def test_the_page_of_what_is_measured_names_all_there_is_without_the_data_folder(monkeypatch):
    """So that a dataset can be added by whoever has none."""
    sys.path.append(str(ROOT / "scripts"))
    from measured import page

    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    text = page()
    names = {p.stem for group in ("dataset", "prompt", "model") for p in (conf_dir() / group).glob("*.yaml")}
    assert all(re.search(rf"\b{re.escape(name)}\b", text) for name in {*names, *METRICS, *presets.available()})


def test_every_number_of_the_readmes_stands_in_a_file_that_they_link_to(tmp_path):
    import verify_docs

    assert verify_docs.main() == 0
    (tmp_path / "a.csv").write_text("x\n12.5\n")
    page = tmp_path / "page.md"
    of_one = "12.5 and 3.25 of [a](a.csv), `9.75`, 12 %, 95 %, 7"
    page.write_text(f"# One\n{of_one}\n# Two\n12.5\n| figure | x |\n| 1.5 | 2.5 |\n")
    actual = [line.partition(": ")[2].split()[0] for line in verify_docs.unsourced(page, tmp_path)]
    assert actual == ["3.25", "12", "12.5"]

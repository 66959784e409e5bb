"""plot, as users type it: files, findings, redrawing, and messages for what cannot be done."""

import json
import shutil
from pathlib import Path

import pytest
from support import processes
from support.families import build

from kvbench.cli.main import main
from kvbench.models import load
from kvbench.papers.figures.place import choose_folder
from kvbench.papers.figures.registry import FIGURES

pytestmark = pytest.mark.e2e("runs whole command lines")

SMALL = ["length=128", "limit=1"]

BAD = {
    "plot": "plot needs a figure",
    "plot uncomp/fig3": "unknown figure uncomp/fig3. Did you mean uncomp/fig",
    "plot list limit=2": "unknown figure list",
    "plot uncomp/fig1 model=./nowhere": "no such folder",
    "plot uncomp/fig1 model={tmp}": "is not a model folder: it has no config.json",
    "plot uncomp/fig1 model=tiny,pythia-70m": "one model at a time",
    "plot uncomp/fig1 dataset=tiny/nedle": "Did you mean needle",
    "plot uncomp/fig1 text={tmp}/absent.txt": "there is no file",
    "plot uncomp/fig1 text={file}": "is empty",
    "plot uncomp/fig1 text=": "give a text file",
    "plot uncomp/fig1 output=": "output= is empty: give a folder",
    "plot uncomp/fig1 text={file} dataset=tiny": "two ways to say what is read",
    "plot uncomp/fig1 samples=3": "prompts of a dataset are counted by limit=",
    "plot uncomp/fig1 samples=0 text={file}": "samples=0 is not possible: a whole number, 1 or more",
    "plot uncomp/fig1 layers=a": "layers=a is not possible: layer numbers",
    "plot uncomp/fig1 bits=3": "bits= is not possible with uncomp/fig1: qhitter/fig2, qhitter/fig3 take it",
    "plot qhitter/fig2 bits=5": "bits=5 is not possible: 1, 2, 3, 4 or 8",
    "plot qhitter bits=4,2": "bits=4,2 is not possible: qhitter/fig3 shows one bit width",
    "plot uncomp/fig1 limit=0": "limit=0 is not possible",
    "plot uncomp/fig1 top=4 top=5": "top= is given 2 times",
    "plot uncomp/fig1 method=snapkv": "results/pareto take methods of your own",
    "plot uncomp/fig1 temperature=1": "each figure sets this itself",
    "plot results/budget kv_size=64": "as in method=snapkv,h2o",
    "plot uncomp/fig1 length=10": "dataset.tiny.length=10",
    "plot --from-csv {tmp}/absent.csv": "there is no file",
    "plot --from-csv {file}": "no figure's CSV",
    "plot uncomp/fig1 --from-csv {file}": "takes only results=FOLDER or output=FOLDER, not uncomp/fig1",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_command_line(line, tmp_path, capsys, monkeypatch, no_weights):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    status = main(line.format(tmp=tmp_path, file=tmp_path / "file").split())
    captured = capsys.readouterr()
    assert status == 2, captured.err
    assert captured.out == ""
    assert captured.err.startswith("kvbench: ") and captured.err.count("\n") == 1
    assert BAD[line] in captured.err


def test_end_to_end_and_again_from_the_csv(tmp_path, capsys):
    line = ["plot", "uncomp/fig4", "think/fig4", "dataset=tiny/needle,tiny/code", *SMALL, f"results={tmp_path}"]
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert max(len(part) for part in printed.splitlines() if str(tmp_path) not in part) <= 100
    assert "here: Truncated effective rank: lowest" in printed and "paper: A few key channels" in printed
    stem = tmp_path / "own" / "tiny" / "figures" / "uncomp" / "fig4"
    text = stem.with_suffix(".csv").read_text()
    assert "# model: tiny (" in text and "# texts: needle (1), code (1)" in text and "# top: 32" in text
    assert (tmp_path / "own" / "tiny" / "figures" / "think" / "fig4.csv").exists()
    done = processes.run("plot", "--from-csv", f"{stem}.csv", f"results={tmp_path / 'b'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == printed.split("\n\n")[0].splitlines()[-1]
    for suffix in (".png", ".svg"):
        built = tmp_path / "b" / "figures" / "uncomp" / f"fig4{suffix}"
        assert built.read_bytes() == stem.with_suffix(suffix).read_bytes()
    assert not (tmp_path / "b" / "figures" / "uncomp" / "fig4.csv").exists()


def test_json_and_knobs_of_several_figures(tmp_path, capsys):
    line = ["plot", "qhitter/fig3", "uncomp/fig6", "dataset=tiny/hop", *SMALL, "layers=0,5", "bits=2", "tokens=40"]
    assert main([*line, f"results={tmp_path}", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [f["id"] for f in result] == ["qhitter/fig3", "uncomp/fig6"]
    text = (tmp_path / "own" / "tiny" / "figures" / "qhitter" / "fig3.csv").read_text()
    assert "# bits: 2\n# layers: 0,5\n# tokens: 40\n" in text
    assert text.count("\nhop,0,2,5,") == 40
    assert "bits" not in (tmp_path / "own" / "tiny" / "figures" / "uncomp" / "fig6.csv").read_text()


def test_a_text_in_windows_is_called_by_its_dataset(tmp_path, capsys):
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "test.txt").write_text("the cold river shines slowly by the tower. " * 60)
    line = ["plot", "uncomp/fig6", "dataset=wikitext2", "length=64", "prefix=32", "limit=1", f"data.root={tmp_path}"]
    assert main([*line, "tokens=48", f"results={tmp_path}"]) == 0
    text = (tmp_path / "own" / "tiny" / "figures" / "uncomp" / "fig6.csv").read_text()
    assert "# texts: wikitext2 (1)\n# prompts: 1 of 48 to 48 tokens\n" in text


def test_windows_of_a_text(tmp_path, capsys):
    path = tmp_path / "notes.txt"
    path.write_text("the cold river shines slowly. it was a calm night by the tower. " * 60)
    line = ["plot", "uncomp/fig6", f"text={path}", "samples=3", "tokens=64", f"results={tmp_path}"]
    assert main(line) == 0
    text = (tmp_path / "own" / "tiny" / "figures" / "uncomp" / "fig6.csv").read_text()
    assert "# texts: the file notes.txt (3)\n# prompts: 3 of 64 to 64 tokens" in text
    assert "Samples of 3 in which" in " ".join(capsys.readouterr().out.split())
    assert main([*line[:4], "tokens=5000", line[5]]) == 2
    assert "fewer than one window" in capsys.readouterr().err


def test_other_models_read_wikitext_and_say_so_without_it(tmp_path, capsys, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    from kvbench.models.config import ModelConfig

    folder = tmp_path / "model"
    build("llama").save_pretrained(folder)
    cfg = ModelConfig(name="tiny", path="embedded:tiny")
    tokenizer = load.load_tokenizer(cfg, load.locate(cfg))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.save_pretrained(folder)
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    assert main(["plot", "uncomp/fig1", f"model={folder}"]) == 2
    assert "name what the model is to read, as dataset=NAME or text=FILE" in capsys.readouterr().err


def test_a_figure_of_which_nothing_is_stored_makes_no_folder(tmp_path, capsys):
    assert main(["plot", "results/pareto", "--stored", f"results={tmp_path / 'emp' / 'x'}"]) == 2
    assert "results/pareto: no data of this figure in" in capsys.readouterr().err
    assert not (tmp_path / "emp").exists()


COMMITTED = Path(__file__).parents[2] / "results"


@pytest.fixture
def committed(tmp_path):
    """A copy of the committed figures, and a function that tells which of its files are not as they were."""
    for folder in ("figures", "tiny/figures"):
        shutil.copytree(COMMITTED / folder, tmp_path / folder)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}

    def changed():
        return sorted(str(p.relative_to(tmp_path)) for p, content in before.items() if p.read_bytes() != content)

    return changed


def test_settings_of_ones_own_leave_the_committed_figures_alone(committed, tmp_path, capsys):
    words = ["limit=1", f"results={tmp_path}"]
    assert main(["plot", "uncomp/fig6", "length=128", *words]) == 0
    captured = capsys.readouterr()
    own = tmp_path / "own" / "tiny" / "figures"
    assert f"uncomp/fig6: {own}/uncomp/fig6.png {own}/uncomp/fig6.svg {own}/uncomp/fig6.csv" in " ".join(
        captured.out.split()
    )
    there = tmp_path / "tiny" / "figures" / "uncomp" / "fig6.csv"
    said = f"kvbench: {there} shows something else and stays: uncomp/fig6 goes to {own}; output=FOLDER names another\n"
    assert said in captured.err
    assert "prompts: 6 of 128" in (own / "uncomp" / "fig6.csv").read_text()
    assert main(["plot", "vatp/fig3", *words]) == 0
    assert committed() == []
    assert main(["plot", "vatp/fig3", "--stored", f"results={tmp_path}"]) == 0  # a part of what the committed one shows
    assert "left out: " in (own / "vatp" / "fig3.csv").read_text() and committed() == []
    capsys.readouterr()
    assert main(["plot", "uncomp/fig6", "length=128", *words, f"output={tmp_path / 'tiny' / 'figures'}"]) == 0
    assert committed() == [f"tiny/figures/uncomp/fig6.{ending}" for ending in ("csv", "png", "svg")]
    assert "output=" not in capsys.readouterr().err


def test_its_own_settings_draw_a_figure_where_it_is(committed, tmp_path, capsys):
    picture = tmp_path / "tiny" / "figures" / "qhitter" / "fig3.png"
    picture.write_bytes(b"")
    assert main(["plot", "qhitter/fig3", f"results={tmp_path}"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and not (tmp_path / "own").exists()
    assert "output=" not in capsys.readouterr().err


def test_a_figure_goes_where_it_replaces_no_other(tmp_path, capsys):
    """Whatever came first: other settings go to the user's own folder, as does another model where one was drawn."""
    figure = FIGURES["uncomp/fig1"]
    facts = {"model": "a (1)", "top": 32}
    plain, own = tmp_path / "figures", tmp_path / "own" / "a" / "figures"

    def folder(facts=facts, model="a", **options):
        return choose_folder(figure, facts, {"model": model, "threads": "1", **options}, str(tmp_path), model)

    assert folder() == plain and capsys.readouterr().err == ""
    assert folder(limit="1", layers="0") == own
    line = f"kvbench: uncomp/fig1 with limit=1 layers=0 goes to {own}; output=FOLDER names another\n"
    assert capsys.readouterr().err == line
    assert folder(limit="1", output="there") == Path("there")
    assert folder({**facts, "methods": "snapkv"}, method="snapkv") == own and capsys.readouterr().err == ""
    path = plain / "uncomp" / "fig1.csv"
    path.parent.mkdir(parents=True)
    path.write_text("# figure: uncomp/fig1\n# model: a (1)\n# top: 32\n")
    assert folder() == plain
    assert folder(top="32") == plain, "these are the settings with which it was drawn"
    assert folder({**facts, "left out": "snapkv: not measured"}) == own, "what shows less"
    assert folder({"model": "b (2)", "top": 32}, model="b") == tmp_path / "own" / "b" / "figures"
    path.write_text("# figure: uncomp/fig1\n# model: a (1)\n# top: 32\n# left out: snapkv: not measured\n")
    assert folder() == plain, "what shows more"
    assert folder({**facts, "left out": "h2o: not measured"}) == plain


def test_a_csv_draws_no_picture_beside_other_data(committed, tmp_path, capsys):
    csv = tmp_path / "mine.csv"
    csv.write_text((tmp_path / "tiny" / "figures" / "uncomp" / "fig4.csv").read_text())
    assert main(["plot", "--from-csv", str(csv), f"results={tmp_path}"]) == 2
    assert f"{tmp_path}/figures/uncomp/fig4.csv holds other data" in capsys.readouterr().err
    assert main(["plot", "--from-csv", str(csv), f"output={tmp_path / 'else'}"]) == 0
    assert (tmp_path / "else" / "uncomp" / "fig4.png").exists() and committed() == []
    assert main(["plot", "--from-csv", str(tmp_path / "figures" / "uncomp" / "fig4.csv"), f"results={tmp_path}"]) == 0


def test_lists(capsys):
    assert main(["plot", "list"]) == 0
    listed = capsys.readouterr().out
    assert main(["list", "figures", "--json"]) == 0
    result = {f["id"]: f for f in json.loads(capsys.readouterr().out)["figures"]}
    assert set(result) == set(FIGURES)
    for figure in FIGURES.values():
        assert f"{figure.id:<14} {figure.title}" in listed
        assert result[figure.id]["claim"] == figure.claim
    assert max(map(len, listed.splitlines())) <= 100

"""The HTML page: self-contained, escaped, and with what the browser of examples needs."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import kvbench
from kvbench.cli.main import main
from kvbench.papers.claims import ledger
from kvbench.papers.figures import registry
from kvbench.papers.forensics import audit
from kvbench.papers.report import cards, page, samples
from kvbench.papers.spec import table_spec
from kvbench.papers.verbs import report
from kvbench.plan import config, run_plan
from kvbench.plan import words as words_of_run
from kvbench.plan.keys import parse_pairs
from kvbench.report import listing, of_run, open_results, verdict
from kvbench.store.store import ResultStore

pytestmark = pytest.mark.e2e("builds the page and opens it in a browser")


def data_of(text):
    return json.loads(re.search(r'id="samples-data">(.*?)</script>', text, re.DOTALL)[1])


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """The page as it was collected, its words, and its HTML. Claims, figures and a table are the committed ones."""
    folder = tmp_path_factory.mktemp("report")
    committed = Path(__file__).parents[2] / "results"
    (folder / "tiny").mkdir()
    for name in ("claims", "tiny/figures", *(p.relative_to(committed) for p in committed.glob("tiny/think-1.*"))):
        (folder / name).symlink_to(committed / name)
    words = ["samples=1", "papers=true", f"results={folder}", "method=full,streamingllm", "kv_size=24", "sinks=4"]
    words += ["dataset=tiny/needle,tiny/code", "length=256"]
    pages = []
    with pytest.MonkeyPatch.context() as patch:
        collect = report._collect_page
        patch.setattr(report, "_collect_page", lambda *a, **kw: pages.append(collect(*a, **kw)) or pages[-1])
        assert main(["report", f"output={folder}/page.html", *words]) == 0
    return pages[0], words, (folder / "page.html").read_text()


@pytest.fixture(scope="module")
def written(collected):
    return collected[2]


def test_nothing_is_fetched(written):
    assert not re.search(r'(src|href)\s*=\s*["\']?(https?:)?//', written)
    assert "default-src 'none'" in written


def test_every_section_is_there(written):
    for heading in ("verdicts", "tables", "figures", "claims", "audit", "samples", "runs"):
        assert f'<h2 id="{heading}">' in written
    assert "think/2" in written
    assert "uncomp/10" in written


def test_examples_show_answers_and_what_was_kept(written):
    actual = data_of(written)
    assert [s["task"] for s in actual] == ["tiny/needle", "tiny/code"]
    full, streaming = actual[0]["methods"]
    assert len(full["kept"]) == len(actual[0]["tokens"]) == 256
    assert set(full["kept"]) == {"9"}
    assert streaming["kept"] == "9" * 4 + "0" * (256 - 24) + "9" * 20


def test_shades_are_the_share_of_layers_and_heads():
    model, _ = kvbench.load_model("tiny")
    ids = torch.arange(40) % 50 + 5
    (cache,) = kvbench.prefill(model, ids, [{"method": "snapkv", "kv_size": 12, "window": 4}])
    shades = samples.shade_tokens(cache)
    counts = torch.zeros(40)
    for layer in cache.layers:
        for head in layer.kept_positions():
            counts[head.long()] += 1
    assert torch.equal(shades, (9 * counts / (6 * 4)).round().long())
    assert shades[-4:].tolist() == [9, 9, 9, 9]


def test_text_from_data_cannot_become_markup():
    evil = "</script><img src=x onerror=alert(1)>"
    run = {"model": evil, "method": evil, "dataset": evil, "score": 1.0}
    text = page.ReportPage(evil, [], [], [], [], [{"tokens": [evil]}], [run]).page()
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert data_of(text) == [{"tokens": [evil]}]


def test_columns_of_numbers_stand_right_and_long_texts_are_wrapped():
    text = page.render_sortable(["n", "id", "why"], [["−1.5", "a/2", "x" * 40], ["1,200", "b", ""]])
    assert text.count('<td class="number">') == text.count('<td class="short">') == text.count('<td class="text">') == 2


def test_figures_say_what_they_show_and_what_is_here(tmp_path):
    folder = tmp_path / "think"
    folder.mkdir()
    committed = Path(__file__).parents[2] / "results" / "figures" / "think"
    for kind in ("png", "csv"):
        (folder / f"fig3b.{kind}").write_bytes((committed / f"fig3b.{kind}").read_bytes())
    figures = page.read_pictures(registry.read_drawn(tmp_path))
    text = page.ReportPage("tiny", [], figures, [], [], [], []).page()
    assert "think/fig3b: memory against batch size" in text
    assert "<b>Here</b> One sequence of 497 tokens: full" in text
    assert "<b>The paper</b> KIVI alone allows four times the batch" in text


def test_figure_10_comes_behind_figure_9():
    assert sorted(["q/fig10", "q/fig9", "q/fig2"], key=registry.number_key) == ["q/fig2", "q/fig9", "q/fig10"]


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = """
const table = document.querySelector("#audit ~ .scroll table");
const column = () => [...table.tBodies[0].rows].map((r) => r.cells[5].textContent);
const before = column();
table.tHead.rows[0].cells[5].click();
document.querySelector("[data-view=published]").click();
document.querySelectorAll("details").forEach((d) => (d.open = true));
const cell = [...document.querySelectorAll("table.paper td")].find((c) => c.querySelector(".published").textContent);
parent.postMessage(JSON.stringify({
  errors: window.errors, width: document.documentElement.scrollWidth, before, after: column(),
  shown: [...cell.children].filter((c) => getComputedStyle(c).display !== "none").map((c) => c.className),
  kept: [...document.querySelectorAll("#prompt span")].filter((t) => t.style.background).length,
}), "*");
"""


def framed(folder, widths):
    """The messages of page.html from frames of these ``widths``, by width; a window of the browser is 500 at least."""
    show = """const said = {};
    addEventListener('message', (e) => {
      for (const f of document.querySelectorAll('iframe')) if (f.contentWindow === e.source) said[f.width] = e.data;
      document.getElementById('said').textContent = JSON.stringify(said);
    })"""
    frames = [f'<iframe width="{width}" height="900" src="page.html"></iframe>' for width in widths]
    (folder / "frame.html").write_text(f'<pre id="said"></pre><script>{show}</script>{"".join(frames)}')
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'user'}"]
    command = [BROWSER, *flags, "--virtual-time-budget=3000", "--dump-dom", f"file://{folder / 'frame.html'}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    text_by_width = json.loads(html.unescape(re.search(r'<pre id="said">(.*?)</pre>', dom, re.DOTALL)[1]))
    return {int(width): json.loads(text) for width, text in text_by_width.items()}


CONTRAST = """
const parts = (s) => {
  const found = s.match(/[\\d.]+/g).map(Number);
  return found.length < 4 ? [...found, 1] : found;
};
const over = (a, b) => [0, 1, 2].map((i) => a[i] * a[3] + b[i] * (1 - a[3]));
const light = (c) => c.map((v) => v / 255).map((v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
document.querySelectorAll("details").forEach((d) => { d.open = true; });
const least = {};
for (const view of ["both", "published", "delta"]) {
  document.body.className = "view-" + view;
  for (const e of document.body.querySelectorAll("*")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || ["SCRIPT", "STYLE", "OPTION"].includes(e.tagName) || !e.getClientRects().length) continue;
    let ground = [0, 0, 0], seen = 1;
    const chain = [];
    for (let x = e; x; x = x.parentElement) { chain.unshift(x); seen *= Number(getComputedStyle(x).opacity); }
    for (const x of chain) ground = over(parts(getComputedStyle(x).backgroundColor), ground);
    const ink = parts(getComputedStyle(e).color);
    const [a, b] = [light(over([...ink.slice(0, 3), ink[3] * seen], ground)), light(ground)].sort((x, y) => y - x);
    const key = e.tagName + "." + e.className;
    least[key] = Math.min(least[key] || 99, (a + .05) / (b + .05));
  }
}
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
document.body.innerHTML = `<pre id="said"></pre>`;
document.getElementById("said").textContent = JSON.stringify({ dark, least });
"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("dark", [True, False])
def test_text_is_readable_on_light_and_dark(written, tmp_path, dark):
    """Every text has a contrast of 4.5 to 1 or more with what is behind it (WCAG 2.1, level AA), in all views."""
    path = tmp_path / "page.html"
    path.write_text(written.replace("</body>", f"<script>{CONTRAST}</script></body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *flags, "--virtual-time-budget=3000", "--dump-dom", f"file://{path}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    result = json.loads(html.unescape(re.search(r'<pre id="said">(.*?)</pre>', dom, re.DOTALL)[1]))
    assert result["dark"] == dark
    assert len(result["least"]) > 10
    assert {k: round(v, 2) for k, v in result["least"].items() if v < 4.5} == {}


def test_a_title_names_the_models_of_the_runs_or_counts_them():
    runs = [{"model": f"model-{i}"} for i in range(4)]
    shown = [page.ReportPage("tiny", [], [], [], [], [], some)._write_title() for some in (runs[:2], runs, [])]
    assert shown[0] == "your runs on model-0, model-1, and five papers beside tiny"
    assert [words.partition(",")[0] for words in shown[1:]] == ["your runs on 4 models", "your runs"]


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_long_path_makes_no_page_wider_than_the_screen(tmp_path):
    path = "/home/someone/models/" + "a_checkpoint" * 20
    runs = [{"model": path, "method": "full", "dataset": "tiny/needle", "score": 1.0, "from": path}]
    text = page.ReportPage(path, [], [], [], [], [], runs, papers=False).page()
    show = "document.querySelectorAll('details').forEach((d) => (d.open = true));"
    say = "parent.postMessage(String(document.documentElement.scrollWidth), '*')"
    (tmp_path / "page.html").write_text(text.replace("</body>", f"<script>{show}{say}</script></body>"))
    assert 0 < framed(tmp_path, [400])[400] <= 400


@pytest.fixture(scope="module")
def probed(written, tmp_path_factory):
    """The messages of the page from a narrow and from a wide frame, by width."""
    folder = tmp_path_factory.mktemp("frames")
    watch = "<script>window.errors = []; addEventListener('error', (e) => window.errors.push(e.message));</script>"
    watched = written.replace("<body", f"{watch}<body", 1)
    (folder / "page.html").write_text(watched.replace("</body>", f"<script>{PROBE}</script></body>"))
    return framed(folder, [390, 1280])


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser(probed, width):
    """Nothing fails, the page is no wider than the screen, columns sort, views switch, and kept tokens are shaded."""
    result = probed[width]
    assert result["errors"] == []
    assert result["width"] <= width
    assert result["shown"] == ["published"]
    assert result["after"] == sorted(result["before"]) != result["before"]
    # streamingllm keeps 24 tokens of 256; it is chosen first, as the best that compresses
    assert result["kept"] == 24


def test_json_has_what_the_page_shows(collected, capsys, monkeypatch):
    shown_page, words, _ = collected
    committed = Path(__file__).parents[2] / "results"
    monkeypatch.setattr(report, "_collect_page", lambda *a, **kw: shown_page)
    assert main(["report", "--json", *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [t["table"] for t in result["tables"]] == [f"{p}/{t}" for p, t in table_spec.table_ids()]
    first = result["tables"][0]
    assert first["measured"]["cells"] == 66 and {c["status"] for c in first["cells"]} == {"measured"}
    assert result["tables"][9]["measured"] is None
    assert result["claims"] == ledger.read_ledgers(committed)
    assert len(result["audit"]) == len(audit()) and {"paper", "table", "why"} <= result["audit"][0].keys()
    assert [s["task"] for s in result["samples"]] == ["tiny/needle", "tiny/code"]
    assert [r["method"] for r in result["runs"]] == ["full", "streamingllm kv_size=24"] * 2
    shown = next(f for f in result["figures"] if f["name"] == "think/fig4")
    assert Path(shown["picture"]).is_file() and shown["here"] and shown["shows"]
    assert main(["report", "--json", "output=page.html"]) == 2
    assert "writes no page" in capsys.readouterr().err


def test_a_front_is_drawn_only_where_intervals_lie_apart():
    def point(size, score, ci):
        return cards._Point("m", size, score, ci)

    small, large = point(10.0, 20.0, (10.0, 30.0)), point(50.0, 80.0, (70.0, 90.0))
    beaten, close = point(60.0, 40.0, (30.0, 50.0)), point(30.0, 60.0, (55.0, 75.0))
    assert cards.find_front([beaten, large, small]) == [small, large]
    assert cards.find_front([small, large, close]) == []
    assert cards.find_front([small, point(50.0, 80.0, None)]) == cards.find_front([small]) == []


def test_cards_have_the_verdict_of_a_run_and_papers_results_are_folded_away(tmp_path):
    words = ["method=snapkv,h2o", "kv_size=24", "window=4", "dataset=tiny/needle,tiny/code", "length=128"]
    assert main(["run", *words, "limit=8", f"results={tmp_path}"]) == 0
    store = ResultStore(tmp_path)
    (found,) = cards.collect_verdicts(store)
    assert (found.model, found.dataset, found.examples) == ("tiny", "2 tasks of tiny", "n = 8 a task")
    prepared = run_plan.prepare(
        config.parse(words_of_run.request(parse_pairs([*words, "limit=8", f"results={tmp_path}"])))
    )
    judged = verdict.judge_methods(of_run.report_run(prepared))
    by_label = {v.method.split()[0]: v for v, _ in found.verdicts}
    assert set(by_label) == {"snapkv", "h2o"}
    for expected in judged:
        actual = by_label[expected.method.split()[0]]
        assert actual.texts()[1:] == expected.texts()[1:]
    runs = open_results.list_lines(store)
    of_papers = {run["cell"] for run in runs if run["method"].startswith(("h2o", "full"))}
    text = page.ReportPage("tiny", [], [], [], [], [], runs, verdicts=[found], paper_cells=of_papers).page()
    # the full cache is the base of the user's own methods, too
    assert re.findall(r"<summary>([^<]*results?)</summary>", text) == [
        "full: 2 results",
        "snapkv: 2 results",
        "measured for papers&#39; tables and claims: 2 results",
    ]
    assert text.count('<article class="card') == 2 and text.count("<svg") == 1 and "No front is drawn" in text
    assert text.index('id="verdicts"') < text.index('id="runs"')


def test_methods_have_no_card_while_the_full_cache_has_no_current_result(tmp_path):
    words = ["method=snapkv", "kv_size=24", "window=4", "dataset=tiny/code", "length=128", "limit=2"]
    assert main(["run", *words, f"results={tmp_path}"]) == 0
    store = ResultStore(tmp_path)
    assert len(cards.collect_verdicts(store)) == 1
    (full,) = [cell for cell in listing.list_cells(store, {}) if cell.label == "full"]
    # an interrupted run has stored samples of the full cache, but not their means
    (store.folder(full.id) / "metrics.json").unlink()
    assert cards.collect_verdicts(store) == []


def test_bad_requests(capsys):
    assert main(["report", "samples=few"]) == 2
    assert "samples=few" in capsys.readouterr().err
    assert main(["report", "page.html"]) == 2
    assert "key=value" in capsys.readouterr().err


def test_a_missing_folder_and_a_run_whose_examples_nobody_asked_for_are_refused(tmp_path, capsys):
    page_file = tmp_path / "page.html"
    assert main(["report", f"results={tmp_path / 'gone'}", f"output={page_file}"]) == 2
    assert f"results={tmp_path / 'gone'}: there is no such folder" in capsys.readouterr().err
    assert main(["report", "method=snapkv", f"results={tmp_path}", f"output={page_file}"]) == 2
    assert "method=snapkv chooses the run whose examples the page shows: add samples=1" in capsys.readouterr().err
    assert not page_file.exists()


def test_own_runs_alone_with_scores_bytes_and_figures(tmp_path, capsys):
    words = ["method=streamingllm", "kv_size=24", "dataset=tiny/needle", "length=128", f"results={tmp_path}", "limit=3"]
    assert main(["run", *words, "fidelity=true"]) == 0
    assert main(["plot", "results/pareto", *words]) == 0
    line = ["report", f"results={tmp_path}"]
    before = sorted(tmp_path.rglob("cells/*"))
    assert main([*line, f"output={tmp_path}/page.html"]) == 0
    text = (tmp_path / "page.html").read_text()
    # the user's own results alone, and nothing that the report itself measured
    assert sorted(tmp_path.rglob("cells/*")) == before
    assert re.findall(r'<h2 id="(\w+)">', text) == ["verdicts", "runs", "samples"]
    assert "five papers" not in text and "data-view=" not in text.partition("<script")[0]
    assert "<title>kvbench: KV-cache compression, your runs on tiny</title>" in text
    assert text.count("<figure>") == 1 and "<b>Shows</b> Every point is a method at one budget" in text
    assert "<b>The paper</b>" not in text and "<b>Ran</b> Model tiny" in text
    capsys.readouterr()
    assert main([*line, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert not any(shown[key] for key in ("tables", "audit", "claims"))
    far, plain = ([r for r in shown["runs"] if bool(r["fidelity"]) == close] for close in (True, False))
    full, streaming = sorted(plain, key=lambda run: run["method"])
    assert streaming["bytes"] < full["bytes"] and streaming["percent_of_full"] < 25 < full["score"]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", text)
    assert f"{streaming['bytes']:,.0f}" in cells and f"{full['score']:.1f}" in cells
    full, streaming = sorted(far, key=lambda run: run["method"])
    full_kl, kl = (r["fidelity"]["greedy"]["kl_mean"] for r in (full, streaming))
    assert f"{streaming['fidelity']['reference']['kl_mean']:.3g}" in cells and full_kl == 0 < kl
    assert '<input type="search"' in text
    out = tmp_path / "shared" / "results.jsonl"
    assert main(["export", "jsonl", f"results={tmp_path}", "method=streamingllm", f"output={out}"]) == 0
    assert capsys.readouterr().out == f"{out} (2 results)\n"
    shared = open_results.read_lines(out.parent)
    assert (
        shared == [r for r in shown["runs"] if "streamingllm" in r["method"]] and shared[0]["protocol"]["query_aware"]
    )
    assert main(["export", "jsonl", f"results={tmp_path}", "output=/dev/full"]) == 1
    assert "/dev/full could not be written" in capsys.readouterr().err
    assert main(["export", "jsonl", f"results={tmp_path}", "name=x"]) == 2 and "name=x" in capsys.readouterr().err


def test_results_of_other_programs_stand_beside_own_runs(tmp_path, capsys):
    theirs = {"model": "theirs-8b", "method": "their<press>", "dataset": "ruler", "score": 87.25, "n": 13}
    place = tmp_path / "theirs"
    place.mkdir()
    (place / "results.jsonl").write_text(json.dumps({**theirs, "protocol": {"query_aware": False}}) + "\n")
    (tmp_path / "mine").mkdir()
    line = ["report", f"results={tmp_path}/mine", f"also={place}"]
    assert main([*line, f"output={tmp_path}/page.html"]) == 0
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", (tmp_path / "page.html").read_text())
    title = (tmp_path / "page.html").read_text().partition("</title>")[0]
    assert title.endswith("KV-cache compression, your runs on theirs-8b")
    assert {"theirs-8b", "their&lt;press&gt;", "87.3", "withheld", str(place)} <= set(cells)
    (place / "results.jsonl").write_text(json.dumps({"model": "theirs-8b", "method": 3}))
    capsys.readouterr()
    assert main(line) == 2 and "line 1" in (message := capsys.readouterr().err) and "method, dataset" in message
    assert main([*line[:-1], f"also={tmp_path}"]) == 2 and "holds no results" in capsys.readouterr().err


def test_a_folder_for_the_page_is_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvbench.papers.verbs.report._collect_page", lambda *a: pytest.fail("it was measured"))
    assert main(["report", f"output={tmp_path}"]) == 2
    assert f"is a folder: name a file in it, as in output={tmp_path}/report.html" in capsys.readouterr().err

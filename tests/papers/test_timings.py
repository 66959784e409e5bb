"""Efficiency tables end to end: rows of ``bench time`` beside the printed values, in every format, traced, verified."""

import csv
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.bench import records, request, timing
from kvbench.cli.main import main
from kvbench.kv.model_shape import Shape
from kvbench.papers.measured import coverage, plan, text
from kvbench.papers.measured.cells import read_cells
from kvbench.papers.report import tables as html_tables
from kvbench.papers.spec import table_spec
from kvbench.papers.timed import bench_spec, timings

pytestmark = pytest.mark.e2e("times tables")

ROOT = Path(__file__).parents[2]
TABLES = [t.id for t in table_spec.find_tables("all") if t.kind == timings.KIND]
KIVI = "kivi bits=4/4;batch=300;prompt=160;gen=338"
HALF = "kivi+think bits=4/4;ratio=0.5;batch=300;prompt=160;gen=338"


def row(method, workload, model, device="cpu x86_64", session="s", status="measured", **quantities):
    prompt, _, rest = workload.partition("+")
    new, _, batch = rest.partition("x")
    spread = {k: {"median": v, "q1": v, "q3": v, "n": 3} for k, v in quantities.items()}
    return {
        "key": f"{method} {workload} {session}",
        "session": session,
        "model": model,
        "method": method,
        "workload": workload,
        "prompt": int(prompt),
        "new": int(new),
        "batch": int(batch),
        "status": status,
        "reason": "",
        "marks": ["integrated"],
        "facts": {"device": device, "processor": "a processor", "threads": 1},
        "quantities": spread | ({"total": {"median": 2.0, "q1": 2.0, "q3": 2.0, "n": 3}} if quantities else {}),
    }


def think10(model, at, **more):
    return [
        row("kivi bits=4", at, model, peak_allocated=40e6, ttft=0.2, tpot=0.02, **more),
        row("think+kivi ratio=0.4 bits=4", at, model, peak_allocated=30e6, ttft=0.3, tpot=0.03, **more),
        row("think+kivi ratio=0.5 bits=4", at, model, status="OOM", **more),
    ]


@pytest.fixture
def results(tmp_path):
    records.append_rows(tmp_path / "cpu" / "think10.jsonl", think10("tiny", "160+338x4"))
    return tmp_path


def shown(capsys, *arguments):
    capsys.readouterr()
    status = main(["table", *arguments])
    return status, capsys.readouterr().out


def test_the_nine_tables_are_declared():
    assert len(TABLES) == 9 and set(TABLES) == {f"{p}/{t}" for p, t in bench_spec.table_ids()}


def test_ratios_stand_beside_ratios_and_values_on_their_devices(results, capsys):
    status, out = shown(capsys, "think/10", f"results={results}", "--format", "md")
    assert status == 0
    cells = next(line for line in out.splitlines() if "ratio=0.4" in line).split("|")[2:5]
    assert [c.strip() for c in cells] == [
        "0.75× (0.86×)<br>ours 0.0300<br>paper 53.3",
        "1.50× (1.49×)<br>ours 75.0<br>paper 10.4",
        "1.50× (0.93×)<br>ours 7.50 ∫<br>paper 0.25",
    ]
    assert "OOM (0.83×)<br>paper 51.2" in out
    assert "tiny with random weights on CPU a processor, 1 thread; the paper's is llama-2-7b on NVIDIA A100" in out
    assert "(substitute model)" in out and "160+338x4 for 160+338x300" in out and "rows those over 75" in out
    # memory is below 1 on both sides, the first token above; a token below there and above here
    assert "2 of 3 ratios lie on the paper's side of 1." in out
    assert "GPU numbers are missing: scripts/gpu_tables.sh think10" in out


@pytest.mark.parametrize("show", text.SHOWS)
@pytest.mark.parametrize("style", ["text", "md", "latex", "html"])
def test_every_view_in_every_format(results, capsys, style, show):
    status, out = shown(capsys, "think/10", f"results={results}", "--stored", "--format", style, "--show", show)
    assert status == 0
    # timings are ratios in any view, so a share shows both sides
    sides = {"ours": "0.75×", "published": "0.86×", "delta": "−0.11", "both": "(0.86×)", "share": "(0.86×)"}
    wanted = sides[show]
    if style == "latex":
        wanted = wanted.replace("−", "$-$").replace("×", r"$\times$")
    assert wanted in out
    assert ("53.3" in out) == (show in ("published", "both", "share"))
    if style == "text":
        assert max(map(len, out.splitlines())) <= 100


def test_csv_names_units_devices_and_bases(results, capsys):
    _, out = shown(capsys, "think/10", f"results={results}", "--stored", "--format", "csv")
    rows = {(r["method"], r["setting"], r["column"]): r for r in csv.DictReader(io.StringIO(out))}
    assert len(rows) == 9
    memory = rows["kivi+think", "bits=4/4;ratio=0.4;batch=300;prompt=160;gen=338", "peak_memory"]
    assert float(memory["ratio"]) == 0.75 and float(memory["ours"]) == 0.03 and memory["unit"] == "GB"
    assert memory["base"] == "kivi" and memory["device"] == "CPU a processor, 1 thread" and memory["delta"] == ""
    assert memory["workload"] == "160+338x4" and memory["published_percent_of_full"] == ""
    assert {r["status"] for r in rows.values()} == {"measured", "OOM"}


def test_a_number_traces_to_its_line_and_that_of_its_base(results, capsys):
    status, out = shown(capsys, "think/10", f"results={results}", "--stored", "--trace", KIVI, "tpot")
    assert status == 0 and "median 0.02" in out and "5 ms/token" in out and "think10.jsonl, line 1," in out
    other = KIVI.replace("kivi bits=4/4", "kivi+think bits=4/4;ratio=0.4")
    _, out = shown(capsys, "think/10", f"results={results}", "--stored", "--trace", other, "peak_memory")
    assert "row: " in out and "line 2," in out and "base: " in out and "line 1," in out and "ratio 0.75" in out


def test_rows_of_a_gpu_come_first_and_never_meet_those_of_a_cpu(results, capsys):
    both = think10("llama2-7b", "160+338x300", device="a GPU")[:1]
    records.append_rows(results / "gpu" / "think10.jsonl", both)
    status, out = shown(capsys, "think/10", f"results={results}")
    assert status == 0 and "llama2-7b with random weights on a GPU" in out and "substitute" not in out.lower()
    # what is missing on the GPU is missing: the CPU's row is no substitute
    assert "not measured yet: scripts/gpu_tables.sh think10" in out and "0.75×" not in out
    _, small = shown(capsys, "think/10", f"results={results}", "model=tiny", "--stored")
    assert "0.75×" in small and "a GPU" not in small


def test_a_cpus_rows_among_a_gpus_are_left_out(tmp_path, capsys):
    rows = [*think10("llama2-7b", "160+338x300"), *think10("llama2-7b", "160+338x300", device="a GPU", session="t")]
    records.append_rows(tmp_path / "gpu" / "think10.jsonl", rows)
    _, out = shown(capsys, "think/10", f"results={tmp_path}")
    assert "Left out: 3 rows of CPU a processor, 1 thread" in out


def test_a_share_of_tokens_follows_from_bytes():
    # 2 layers, 4 query heads on 2 kv heads of 8 channels, 10 tokens, float32; 4 bytes of positions a token and layer
    shape, at = Shape(layers=2, query_heads=4, kv_heads=2, head_dim=8), "10+4x3"
    own_value, each = (2 * heads * 8 * 2 * 4 for heads in (2, 4))  # payload of one token in all layers
    full = row("full", at, "tiny", cache_bytes=3 * 10 * (own_value + 8)) | {"dtype": "float32"}
    kept_tokens = 3 * (10 + 5) / 2  # all tokens of the first layer, half of those of the second, of three rows
    repeated = row("refreekv per=query_head", at, "tiny", cache_bytes=kept_tokens * (each + 8)) | {"dtype": "float32"}
    plain = row("refreekv", at, "tiny", cache_bytes=kept_tokens * (own_value + 8)) | {"dtype": "float32"}
    assert timings.compute_kept_share(repeated, full, shape) == pytest.approx(0.75)
    assert timings.compute_kept_share(plain, full, shape) == pytest.approx(0.75)


def test_the_budget_of_refreekv_is_one_of_tokens(tmp_path, capsys):
    # the tiny model: 6 layers, 8 query heads on 4 kv heads of 32 channels
    at, full = "512+1024x1", 512 * 6 * (4 * 32 * 2 * 4 + 4)
    rows = [
        row("full", at, "tiny", cache_bytes=full) | {"dtype": "float32"},
        row("refreekv per=query_head", at, "tiny", cache_bytes=384 * 6 * (8 * 32 * 2 * 4 + 4)) | {"dtype": "float32"},
    ]
    records.append_rows(tmp_path / "cpu" / "refreekv10.jsonl", rows)
    arguments = ["refreekv/10", f"results={tmp_path}", "--stored"]
    _, out = shown(capsys, *arguments, "--format", "csv")
    actual = {(r["method"], r["setting"], r["column"]): r["ours"] for r in csv.DictReader(io.StringIO(out))}
    where = "batch=1;input=4096;output=8192"
    assert float(actual["refreekv", where, "narrativeqa/budget"]) == pytest.approx(75)
    _, out = shown(capsys, *arguments, "--trace", f"refreekv {where}", "narrativeqa/budget")
    assert f"cache_bytes: median {384 * 6 * (8 * 32 * 2 * 4 + 4)}" in out and "75 pct" in out


def test_notes_of_timings_say_what_the_view_shows(results):
    seen = read_cells(plan.prepare(table_spec.load("think", "10"), "tiny", [f"results={results}"]))
    notes = {show: " ".join(text.write_notes(seen, show)) for show in text.SHOWS}
    assert [show for show in notes if "Substitute model" in notes[show]] == ["both", "ours", "delta", "share"]
    assert [show for show in notes if "our ratio less the paper's" in notes[show]] == ["delta"]
    assert "the paper's over its own kivi" in notes["published"]
    assert text.write_title(seen, "published").endswith("as printed")


@pytest.mark.parametrize("name", TABLES)
def test_without_rows_the_printed_side_stands_with_what_would_measure_it(name, tmp_path, capsys):
    status, out = shown(capsys, name, f"results={tmp_path}", "--stored")
    assert status == 0 and "as printed" in out and f"kvbench table {name}" in out
    assert max(map(len, out.splitlines())) <= 100
    own_value = bench_spec.load(*name.split("/")).model
    status, out = shown(capsys, name, f"results={tmp_path}", f"model={own_value}")
    assert status == 0 and f"not measured yet: scripts/gpu_tables.sh {bench_spec.load(*name.split('/')).results}" in out


def test_bases_are_those_of_the_same_workload(tmp_path, capsys):
    _, out = shown(capsys, "uncomp/10", f"results={tmp_path}", "--stored", "--format", "csv")
    rows = {(r["method"], r["setting"], r["column"]): r for r in csv.DictReader(io.StringIO(out))}
    cell = rows["uncomp-stage", "batch=8;prompt=3712;gen=384;kv_size=384", "wikitext2/tpot"]
    assert float(cell["published_ratio"]) == pytest.approx(4.822 / 11.823)
    # the paper's full cache does not fit there
    assert rows["uncomp-stage", "batch=12;prompt=3712;gen=384;kv_size=384", "wikitext2/tpot"]["published_ratio"] == ""
    _, out = shown(capsys, "uncomp/10", f"results={tmp_path}", "--stored")
    assert "paper OOM" in out and "28.055" in out


def test_what_is_missing_is_measured_once(tmp_path, monkeypatch, capsys):
    requests = []

    def measure(words, plan, beside):
        inputs = dict(w.split("=", 1) for w in words)
        requests.append(inputs)
        path = Path(inputs["folder"]) / f"{inputs['name']}.jsonl"
        records.append_rows(path, think10(inputs["model"], inputs["workloads"]))
        return [], path

    monkeypatch.setattr(request, "measure_rows", measure)
    assert main(["table", "think/10", f"results={tmp_path}", "repeats=1"]) == 0
    (inputs,) = requests
    assert inputs["workloads"] == "160+338x4" and inputs["method"] == "kivi,kivi+think" and inputs["device"] == "cpu"
    assert inputs["repeats"] == "1" and inputs["threads"] == "1" and inputs["name"] == "think10"
    assert main(["table", "think/10", f"results={tmp_path}"]) == 0 and len(requests) == 1
    assert main(["table", "think/10", f"results={tmp_path}", "again=true"]) == 0 and len(requests) == 2
    # the paper's own model is not measured here
    assert main(["table", "think/10", f"results={tmp_path}", "model=llama2-7b"]) == 0 and len(requests) == 2
    assert main(["table", "think/10", f"results={tmp_path / 'x'}", "--stored"]) == 0 and len(requests) == 2


def test_a_plan_measures_nothing(tmp_path, capsys):
    status, out = shown(capsys, "think/10", f"results={tmp_path}", "--plan")
    assert status == 0 and out.count("to measure") == 4 and "160+338x4" in out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["think/10", "limit=2"], "limit=2 is not possible here: think/10 is timed, not scored"),
        (["think/10", "--stored", "--trace", "nothing", "tpot"], "unknown row"),
        (["think/10", "--stored", "--trace", KIVI, "nothing"], "unknown column"),
        (["think/10", "model=llama2-7b", "--trace", HALF, "tpot"], "is not there: not measured yet (scripts/gpu_tab"),
        (["think/10", "model=llama2-7b", "again=true"], "again=true is not possible here"),
        (["think/10", "repeats=0", "again=true"], "repeats=0 is not possible"),
    ],
)
def test_mistakes_are_named(arguments, message, results, capsys):
    assert main(["table", *arguments, f"results={results}"]) == 2
    assert message in capsys.readouterr().err


def test_rows_that_failed_are_an_error_with_its_reason(tmp_path, capsys):
    rows = think10("tiny", "160+338x4")
    records.append_rows(
        tmp_path / "cpu" / "think10.jsonl", [*rows[:2], rows[2] | {"status": "refused", "reason": "why"}]
    )
    status, out = shown(capsys, "think/10", f"results={tmp_path}", "--stored")
    assert status == 1 and "✗ (0.83×)" in out and "✗ think+kivi ratio=0.5 bits=4 at 160+338x4: why" in out


def test_the_report_shows_them(results):
    table = table_spec.load("think", "10")
    text = html_tables.render_table(read_cells(plan.prepare(table, "tiny", [f"results={results}"])))
    assert "0.75×" in text and "OOM" in text and "CPU a processor" in text
    records.append_rows(results / "gpu" / "think10.jsonl", think10("llama2-7b", "160+338x300", device="a GPU"))
    text = html_tables.render_table(read_cells(plan.prepare(table, "tiny", [f"results={results}"])))
    assert "on a GPU" in text and "CPU a processor" not in text


def test_what_is_counted_of_a_table(results):
    seen = read_cells(plan.prepare(table_spec.load("think", "10"), "", [f"results={results}"]))
    line = coverage.count_cells(seen)
    counted = {name: text for name, text in line.items() if text}
    assert counted == {"table": "think/10", "model": "tiny", "measured": "9", "refused": "0", "missing": "0"}
    coverage.write_counts(results / "tables", line | {"table": "think/9"})
    coverage.write_counts(results / "tables", line)
    assert list(coverage.read_counts(results / "tables")) == ["think/9", "think/10"]
    none = coverage.count_cells(read_cells(plan.prepare(table_spec.load("qhitter", "2"), "", [f"results={results}"])))
    assert (none["measured"], none["missing"]) == ("0", "30")


def test_the_list_says_what_is_measured(results, capsys):
    seen = read_cells(plan.prepare(table_spec.load("think", "10"), "", [f"results={results}"]))
    coverage.write_counts(results / "tables", coverage.count_cells(seen) | {"refused": "2"})
    assert main(["list", "tables", f"results={results}"]) == 0
    out = capsys.readouterr().out
    assert "(9 published; tiny: 9 measured, 2 refused)" in " ".join(out.split())
    assert main(["list", "tables", f"results={results}", "--json"]) == 0
    result = {t["id"]: t for t in json.loads(capsys.readouterr().out)["tables"]}
    assert result["think/10"]["ours"] == [{"model": "tiny", "measured": 9, "refused": 2, "missing": 0}]
    assert result["think/2"]["ours"] == []


def test_the_list_covers_every_committed_table():
    known = coverage.read_counts(ROOT / "results" / "tiny")
    assert set(known) == {t.id for t in table_spec.find_tables("all") if t.measurable or t.kind == timings.KIND}


def test_verifying_finds_one_altered_digit(tmp_path):
    import paper_tables

    shutil.copytree(ROOT / "results" / "cpu", tmp_path / "cpu")
    (tmp_path / "tiny").mkdir()
    for name in ("think-10.md", coverage.FILE):
        shutil.copy(ROOT / "results" / "tiny" / name, tmp_path / "tiny" / name)
    verify = ["think/10", "--verify", "--committed", str(tmp_path)]
    assert paper_tables.main(verify) == 0
    page, rows = tmp_path / "tiny" / "think-10.md", tmp_path / "cpu" / "think10.jsonl"
    before = page.read_text()
    at = before.index("ours ") + 5
    page.write_text(before[:at] + str((int(before[at]) + 1) % 10) + before[at + 1 :])
    assert paper_tables.main(verify) == 1
    page.write_text(before)
    assert paper_tables.main(verify) == 0
    changed = records.read_rows(rows)
    for r in changed:
        if r["method"] == "kivi bits=4":
            r["quantities"]["tpot"]["median"] *= 1.1
    rows.write_text("".join(json.dumps(r) + "\n" for r in changed))
    assert paper_tables.main(verify) == 1


def test_a_table_is_timed_for_real(tmp_path, capsys, monkeypatch):
    """At a smaller size than the committed rows; memory, which the table has none of, is measured in no process."""
    small = replace(bench_spec.load("vatp", "4"), stand_in=bench_spec.Scale(lengths=32, rows=6))
    monkeypatch.setattr(bench_spec, "load", lambda paper, table: small)
    monkeypatch.setattr(timing.Trial, "ask", lambda *request, **options: {"allocated": 1, "reserved": 2})
    status, out = shown(capsys, "vatp/4", f"results={tmp_path}", "repeats=1", "warmup=0", "--format", "csv")
    assert status == 0
    rows = {r["method"]: r for r in records.read_rows(tmp_path / "cpu" / "vatp4.jsonl")}
    cells = [r for r in csv.DictReader(io.StringIO(out)) if "budget=0.25;gpu=a100-80g" in r["setting"]]
    quarter = next(m for m in rows if m.startswith("scissorhands+vatp half_ratio=0.125"))
    speeds = [rows[m]["quantities"]["throughput"]["median"] for m in (quarter, "full")]
    assert float(cells[0]["ratio"]) == pytest.approx(speeds[0] / speeds[1])
    assert {r["workload"] for r in rows.values()} == {"128+4x2"}

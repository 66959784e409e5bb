"""The audit: a pure function of the cells that finds what is known, whatever is altered, and no more on sound data."""

import hashlib
import json
import random
import re
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
import yaml
from support.papers_text import beside

from kvbench.cli.main import main
from kvbench.papers import DATA, forensics
from kvbench.papers.forensics import audit, report
from kvbench.papers.forensics import exact as exact_cells
from kvbench.papers.forensics.copies import find_breaks
from kvbench.papers.forensics.exact import recomputed_cells
from kvbench.papers.forensics.granularity import fit_grids, is_attainable
from kvbench.papers.forensics.identity import identity
from kvbench.papers.forensics.repeats import find_repeated_places
from kvbench.papers.forensics.statements import judge_statements
from kvbench.papers.spec import catalogue
from kvbench.papers.spec.numbers import decimals, format_fixed
from kvbench.papers.spec.published_cells import Book, read_published

pytestmark = pytest.mark.e2e("recomputes every paper's statements")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def findings():
    return audit()


def places(findings, check):
    return [(f.paper, f.table, f.row, f.cell) for f in findings if f.check == check]


def with_cell(i, text):
    cells = read_published().cells
    return Book((*cells[:i], replace(cells[i], printed=text, value=float(text)), *cells[i + 1 :]))


def larger(cell):
    """The value and a tenth of it, printed with as many digits; always another one."""
    digits = decimals(cell.printed)
    return format_fixed(Fraction(cell.printed) * Fraction(11, 10) + Fraction(1, 10**digits), digits)


def drawn(seed, many):
    numbers = [i for i, c in enumerate(read_published().cells) if c.value is not None]
    return random.Random(seed).sample(numbers, many)


def altered_tables(cells):
    """The (paper, table) whose printed cells differ from the fingerprint in paper.yaml; flags are our own words."""
    lines = {}
    for row in cells.rows:
        lines.setdefault((row.paper, row.table), []).extend(
            "\t".join((c.model, c.method, c.setting, c.dataset, c.metric, c.printed, c.unit, str(c.row)))
            for c in row.cells.values()
        )
    prints = {at: hashlib.sha256("\n".join(of_table).encode()).hexdigest()[:12] for at, of_table in lines.items()}
    papers = {p: yaml.safe_load((DATA / p / "paper.yaml").read_text(encoding="utf-8")) for p in cells.papers}
    recorded = {(p, str(t)): text for p, content in papers.items() for t, text in content["recorded"].items()}
    assert prints.keys() == recorded.keys()
    return [at for at, text in prints.items() if text != recorded[at]]


def ids(findings):
    return {f.id for f in findings}


def test_altering_any_cell_makes_a_finding_appear_or_vanish():
    before, by_arithmetic = {}, 0
    for i in drawn(1, 12):
        cell = read_published().cells[i]
        own_value = [c for c in read_published().cells if c.paper == cell.paper]
        if cell.paper not in before:
            before[cell.paper] = ids(audit(Book(tuple(own_value))))
        altered = replace(cell, printed=larger(cell), value=float(larger(cell)))
        changed = Book(tuple(altered if c is cell else c for c in own_value))
        seen = ids(audit(changed)) != before[cell.paper]
        assert seen or altered_tables(changed), cell
        by_arithmetic += seen
    # on the others nothing else on the page depends: only their table's fingerprint sees them
    assert by_arithmetic >= 9


@pytest.mark.parametrize("paper", ["uncomp", "vatp"])
def test_an_altered_dataset_fact_is_named(paper):
    facts = (i for i, c in enumerate(read_published().cells) if (c.paper, c.table, c.dataset) == (paper, "5", "lcc"))
    i = next(i for i in facts if read_published().cells[i].metric == "n_samples")
    altered = Book(tuple(cell for cell in with_cell(i, "400").cells if cell.paper == paper))
    wrong = [f for f in audit(altered) if (f.check, f.table) == ("derived", "5")]
    assert [(f.paper, f.cell, f.printed, f.recomputed) for f in wrong] == [(paper, "lcc n_samples", "400", "500")]


def test_a_last_digit_is_seen_by_the_fingerprint():
    i = drawn(3, 1)[0]
    cell = read_published().cells[i]
    text = format_fixed(Fraction(cell.printed) + Fraction(1, 10 ** decimals(cell.printed)), decimals(cell.printed))
    assert altered_tables(with_cell(i, text)) == [(cell.paper, cell.table)]
    assert altered_tables(read_published()) == []


def test_findings_do_not_depend_on_what_was_flagged(findings):
    assert audit(Book(tuple(replace(c, flag="") for c in read_published().cells))) == findings


def test_ids_tell_findings_apart(findings):
    assert len({f.id for f in findings}) == len(findings)
    assert {f.check for f in findings} <= set(report.HEADS)


def test_wrong_averages(findings):
    wrong = {
        f.row: (f.printed, f.recomputed, f.why) for f in findings if f.check == "derived" and f.cell.startswith("avg")
    }
    assert len([k for k in wrong if "budget=" in k]) == 8
    row = wrong["mistral-7b-instruct-v0.3 h2o budget=0.2"]
    assert row[0] == "-23.55" and row[1].startswith("-21.2") and "the full row of llama-3-8b-instruct" in row[2]
    assert "no full row of the table gives it" in wrong["llama-3-8b-instruct snapkv budget=0.2"][2]
    random_groups = wrong["llama-2-7b-chat uncomp-group kv_size=64 group_sizes=96/32 partition=random"]
    assert "trec and lcc print the same 32.50, and 33.00 in one would do" in random_groups[2]
    assert "sum to 1.64 too little" in wrong["llama-2-7b-chat kivi+think bits=2/2 ratio=0.4"][2]


def test_repeated_cells(findings):
    many = find_repeated_places(read_published())
    assert 600 < len(many) < 700
    repeats = places(findings, "repeat")
    assert ("refreekv", "2+4+5+8+9+11+text", "llama-3-8b-instruct refreekv k=1 t=0.01", "narrativeqa") in repeats
    sets = [p[3] for p in repeats if p[0] == "uncomp" and p[2].startswith("llama-2-7b-chat uncomp-group")]
    assert sets == ["qasper", "hotpotqa", "musique", "gov_report", "qmsum", "samsum", "lcc"]
    assert len(repeats) == 12


def test_the_same_measurement_under_several_names():
    ours = [
        r
        for r in read_published().rows
        if (r.paper, r.method, r.model) == ("uncomp", "uncomp-group", "llama-2-7b-chat")
    ]
    rows = {(r.table, r.setting): r for r in ours}
    main_row = next(r for k, r in rows.items() if k[0] == "1")
    for table, part in (("2", "kv_low=256"), ("6", "256/512"), ("7", "topk=32")):
        other = next(r for k, r in rows.items() if k[0] == table and k[1].endswith(part))
        assert identity(other) == identity(main_row)
    assert identity(next(r for k, r in rows.items() if "topk=64" in k[1])) != identity(main_row)


def test_copies_twins_gains_and_breaks(findings):
    ((_, _, row, cells),) = places(findings, "copy")
    assert row.startswith("mistral-7b-instruct-v0.3 pyramidkv") and cells == "narrativeqa+2wikimqa+musique+qmsum"
    assert len(places(findings, "twin")) == 8 and len(places(findings, "gain")) == 4
    assert [(t, c) for _, t, _, c in places(findings, "break")] == [("5", "narrativeqa"), ("9", "narrativeqa")]


@pytest.mark.parametrize("absent", ["20%", "40%", "60%"])
def test_a_break_is_found_where_a_row_of_the_series_lacks_the_dataset(absent):
    cell = next(c for c in read_published().cells if c.table == "2" and c.metric == "f1" and c.value is not None)
    cells = []
    for dataset in ("one", "other"):
        for k, value in (("20%", 13.0), ("40%", 13.1), ("60%", 13.2), ("80%", 3.21)):
            if (dataset, k) != ("one", absent):
                altered = replace(cell, setting=f"k={k}", dataset=dataset, printed=f"{value:.2f}", value=value)
                cells.append(altered)
    found = [(f.row, f.cell, f.recomputed) for f in find_breaks(Book(tuple(cells)))]
    row = f"{cell.model} {cell.method} k=80%"
    assert sorted(found) == [(row, "one", "13.21"), (row, "other", "13.21")]


def test_granularity_by_hand():
    assert is_attainable("33.33", 3) and is_attainable("66.67", 3) and not is_attainable("33.34", 3)
    assert is_attainable("0.08", 1319) and not is_attainable("0.05", 1319)
    assert is_attainable("100.00", 7) and not is_attainable("100.02", 5000)
    shown = {(f.grid.paper, f.grid.dataset, f.grid.n): (len(f.cells), len(f.off)) for f in fit_grids(read_published())}
    assert shown["refreekv", "gsm8k", 1319] == (68, 2) and shown["refreekv", "gpqa", 448] == (48, 8)
    assert shown["vatp", "trec", 200] == (12, 10) and shown["vatp", "trec", 300] == (12, 0)
    chance = next(f.chance for f in fit_grids(read_published()) if f.grid.n == 200)
    assert chance == pytest.approx(201 / 10001)


def test_a_statement_follows_its_cells():
    before = {j.statement.text: j.verdict for j in judge_statements(read_published())}
    cells = read_published().cells
    i = next(i for i, c in enumerate(cells) if (c.table, c.dataset) == ("4", "needle") and c.method == "uncomp-group")
    after = {j.statement.text: j.shown for j in judge_statements(with_cell(i, "99.90"))}
    assert before["It beats the full cache in the needle test"] == "partly"
    assert after["It beats the full cache in the needle test"].startswith("2 of 4")


def test_tables_and_papers_are_chosen(findings, capsys):
    assert {f.paper for f in audit(paper="vatp") if "+" not in f.paper} == {"vatp"}
    assert all("7" in f.table.split("+") for f in audit(paper="think/7"))
    for what in ("thinc", "think/13", "all/2"):
        assert main(["audit", what]) == 2
        assert "unknown" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["think", "refreekv/2", "vatp"])
def test_the_verb(what, capsys, monkeypatch):
    # both ways to print read the same findings and the same cells
    find = cache(audit)
    monkeypatch.setattr(forensics, "audit", lambda book, what: find(paper=what))
    monkeypatch.setattr(exact_cells, "recomputed_cells", lambda book: recomputed())
    assert main(["audit", what]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100 and "finding" in shown
    assert main(["audit", what, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert len(plain["findings"]) == len(find(paper=what)) and {"id", "why"} <= plain["findings"][0].keys()
    assert main(["audit", what, "--exact"]) == 0
    exact = capsys.readouterr().out
    assert max(map(len, exact.splitlines())) <= 100 and "✓" in exact
    assert main(["audit", what, "--exact", "--json"]) == 0
    assert {"formula", "ok", "recomputed"} <= json.loads(capsys.readouterr().out)[0].keys()
    assert main(["audit", what, "--exact", "--format", "md"]) == 0
    assert capsys.readouterr().out.startswith("## ")


def test_a_table_without_recomputable_cells(capsys):
    assert main(["audit", "uncomp/4", "--exact"]) == 2
    assert "no value of it can be computed without a model" in capsys.readouterr().err


def test_the_committed_audit_is_current(findings):
    committed = (ROOT / "results" / "audit.md").read_text(encoding="utf-8")
    assert report.markdown(findings, read_published(), "all") == committed, (
        "run: kvbench audit all --format md > results/audit.md"
    )


# what is known of these tables, beside the project
PAPERS = "|".join(catalogue.paper_ids())


def known():
    text = beside("KVBENCH_TABLES", "tables", "FINDINGS.md")
    return {s.split("\n", 1)[0]: s for s in re.split(r"^## ", text, flags=re.M)}


def section(number):
    return next(s for head, s in known().items() if head.startswith(f"{number}."))


def test_known_averages_are_found(findings):
    chosen = {(f.paper, f.table, f.row, f.printed) for f in findings if f.check in ("derived", "rounding")}
    rows = re.findall(rf"^(?:\| |- )({PAPERS}) T(\d+) (.*?) \[(.*?)\](.*)$", section(1), re.M)
    assert len(rows) == 16
    for paper, table, row, setting, rest in rows:
        label = f"{row} {setting}".replace(";", " ")
        stated = re.search(r"[-+]?\d+\.\d+", rest.replace("prune_time", "")).group().lstrip("+")
        assert (paper, table, label, stated) in chosen, (paper, table, label, stated)
    assert ("refreekv", "1", "llama-3-8b-instruct snapkv budget=0.9", "99.9") in chosen


def test_known_repeats_and_copies_are_found(findings):
    rows = re.findall(rf"^\| ({PAPERS}) (\S+) (\S+) (\S+) \*\*(\S+)\*\* \| (.*) \|$", section(2), re.M)
    assert len(rows) == 10
    for paper, model, method, setting, dataset, values in rows:
        label = f"{model} {method} {setting}".replace(";", " ")
        (chosen,) = [f for f in findings if (f.check, f.paper, f.row, f.cell) == ("repeat", paper, label, dataset)]
        known_values = {float(v) for v in re.findall(r"(\d+\.\d+) \(T", values)}
        assert {float(v) for v in re.findall(r"(\d+\.\d+) \(", chosen.printed)} == known_values
    twins = re.findall(rf"^- ({PAPERS}) T(\d+) (.*?) \[(.*?)\]: (\S+) = (\S+) = ", section(3), re.M)
    gains = re.findall(rf"^- ({PAPERS}) T(\d+) (.*?) \[(.*?)\]: (\S+) \S+ versus full", section(3), re.M)
    assert len(twins) == 7 and len(gains) == 4
    for paper, table, row, setting, *cells in twins + gains:
        place = (paper, table, f"{row} {setting}".replace(";", " "), "+".join(cells))
        assert place in places(findings, "twin" if len(cells) == 2 else "gain"), place


def test_known_granularity_is_found(findings):
    rows = re.findall(r"^- T(\d+) (.*?) \[(.*?)\] (\S+) ([\d.]+) \(n=\d+\)$", section(4), re.M)
    chosen = {(f.row, f.cell, f.printed) for f in findings if f.check == "granularity"}
    # a value that two tables print is named at the one that comes first
    assert {(f"{row} {s}".replace(";", " "), d, v) for _, row, s, d, v in rows} == chosen and len(rows) == 22
    table = re.findall(r"^\| (\w+) \| (\w+) \| (\d+) \| (\d+) \| (\d+) \| (\d+)% \|$", section(4), re.M)
    fitted = {(f.grid.paper, f.grid.dataset, str(f.grid.n)): f for f in fit_grids(read_published())}
    for paper, dataset, n, _, on, _ in table:
        fit = fitted[paper, dataset, n]
        assert len(fit.cells) - len(fit.off) >= int(on)


STATED = {
    "section 4.3: 90.4": ("think", "90.6", "does not hold"),
    'appendix G: KV cache "compressed by 80%"': ("think", "shrinks by 80 %", "does not hold"),
    "drops 1.28": ("think", "exact:text:avg drop_vs_full", "holds"),
    "KV 2048, lambda 0.4": ("think", "beat the full cache of LLaMA-3-8B", "holds"),
    "averages rise": ("think", "Averages rise", "holds"),
    "Table 7: ThinK wins": ("think", "At equal memory", "holds"),
    "needle: lambda 0.4": ("think", "never below", "holds"),
    "section 3.3: throughput": ("refreekv", "Throughput rises", "does not hold"),
    "fastest in 8": ("refreekv", "Fastest in 8", "holds"),
    "section 3.4: k=1": ("refreekv", "One row of attention", "partly"),
    "section 3.4: NarrativeQA": ("refreekv", "repeat:narrativeqa", "does not hold"),
    "Table 6 gsm8k": ("refreekv", "exact:6:gsm8k budget", "does not hold"),
    "Table 6 coqa": ("refreekv", "exact:6:coqa budget", "holds"),
    "introduction: the KV cache": ("refreekv", "exact:text:kv_memory", "does not hold"),
    "section 3.2: Math": ("refreekv", "Budgets on mathematics", "partly"),
    "losses 0.77": ("uncomp", "exact:text:avg drop", "holds"),
    "prefill speed-up": ("uncomp", "exact:text:prefill_time speedup_vs_full", "holds"),
    "Table 1 caption: stage": ("uncomp", "1.4 times faster", "does not hold"),
    "one compression rate for LLaMA": ("uncomp", "cut to one stated share", "does not hold"),
    "one compression rate for CHAI": ("uncomp", "CHAI has one", "does not hold"),
    "throughput x6.4": ("uncomp", "exact:text:throughput speedup_vs_full", "holds"),
    "group count": ("uncomp", "Groups change", "holds"),
    "needle: better": ("uncomp", "needle test", "partly"),
    "VATP wins": ("vatp", "VATP wins", "holds"),
    "Table 4 speed-ups": ("vatp", "Speed-ups", "holds"),
    "speed-ups up to": ("qhitter", "33, 7, 4 and 1.3", "holds"),
    "perplexity increase": ("qhitter", "exact:text:ptb ppl_increase", "holds"),
    "Table 3: gain": ("qhitter", "gains in every setting", "holds"),
    "5% to 12.5%": ("qhitter", "5 to 12.5 %", "holds"),
}
"""Each known statement: where this audit has it (a statement's words, a recomputed cell, a repeat) and the verdict."""
NOTED = {
    "Table 7 Memory": "What the memory column counts",
    "Tables 10/11": "What the times are per",
    "section 4.1 says": "LongBench has 17 datasets",
    "Table 10: latency": "exact:10:narrativeqa throughput",
    "Tables 5/9": "break:narrativeqa",
    "Table 7: keeping": "Keeping one more layer whole",
    "Table 8 caption": "Five pruning methods",
    "63.09%": "Which schedule keeps 63.09 %",
    'Table 3: "attention time"': "What the attention time is",
    "Table 10, 4032": "less memory",
    "Table 10, 3712": "Time per token falls",
    "TREC and LCC": "random partition",
    "the Mistral model": "Which Mistral",
    "Table 1 has no averages": "Averages of table 1",
    "Table 3: H2O + 4 bit": "Rouge-L rises",
    "quantisation harms": "Few bits harm",
}
"""Each known accounting note: where this audit has it."""


@cache
def recomputed():
    return recomputed_cells(read_published())


@cache
def judgements():
    return judge_statements(read_published())


def verdict_of(paper, what, findings):
    kind, _, rest = what.partition(":")
    if kind == "exact":
        table, _, column = rest.partition(":")
        cells = [e for e in recomputed() if (e.cell.paper, e.cell.table) == (paper, table)]
        chosen = [e.ok for e in cells if e.column.startswith(column)]
        return {True: "holds", False: "does not hold"}[all(chosen)] if chosen else None
    if kind in ("repeat", "break"):
        return (
            "does not hold" if any(f.check == kind and f.paper == paper and f.cell == rest for f in findings) else None
        )
    chosen = [j.verdict for j in judgements() if j.statement.paper == paper and what in j.statement.text]
    return chosen[0] if len(chosen) == 1 else None


@pytest.mark.parametrize(("fragment", "mine"), STATED.items())
def test_known_statements_have_the_same_verdict(fragment, mine, findings):
    paper, what, expected = mine
    assert verdict_of(paper, what, findings) == expected


def test_no_known_statement_or_note_is_left_out(findings):
    text = section(5)
    ledger, notes = text.split("### Accounting")
    rows = re.findall(rf"^\| (?:{PAPERS}) \| (.*?) \| .* \| (.*?) \|$", ledger, re.M)
    assert len(rows) == len(STATED)
    for statement, verdict in rows:
        (fragment,) = [f for f in STATED if f in statement]
        assert STATED[fragment][2] == verdict.strip("*")
    lines = re.findall(rf"^- \*\*({PAPERS})\*\* (.*)$", notes, re.M)
    assert len(lines) == len(NOTED)
    for paper, note in lines:
        (fragment,) = [f for f in NOTED if f in note]
        assert verdict_of(paper, NOTED[fragment], findings) is not None, note


def test_known_baselines_are_found(findings):
    printed = {(f.row, f.cell): f.printed for f in findings if f.check == "baseline"}
    ours = {place: {float(v) for v in re.findall(r"([\d.]+) \(", text)} for place, text in printed.items()}
    names = {"LLaMA-3-8B-Instruct": "llama-3-8b-instruct", "LLaMA-2-7B-chat": "llama-2-7b-chat"}
    model, checked = "", 0
    for line in section(6).splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if line.startswith("|") and cells[0][0].isupper():
            model = names.get(cells[0], "mistral-7b-instruct")
        elif line.startswith("| ") and float(cells[-1]) > 0:
            for value in filter(None, cells[1:-1]):
                assert float(value) in ours[model, cells[0]]
            checked += 1
    assert checked >= 46


def test_known_flags_are_carried():
    counted = {p: [0, 0, 0] for p in catalogue.paper_ids()}
    for p in catalogue.paper_ids():
        for entry in catalogue.read_paper(p).entries:
            if entry.id.isdigit():
                counts = entry.count_cells()
                for i, kind in enumerate(("suspect", "repaired", "missing")):
                    counted[p][i] += counts[kind]
    rows = re.findall(rf"^\| ({PAPERS}) \| \d+ \| \d+ \| \d+ \| (\d+) \| (\d+) \| (\d+) \|$", section(9), re.M)
    assert {p: [int(a), int(b), int(c)] for p, a, b, c in rows} == counted

"""Records of results: what is read from disk and written again is the same, old and unknown fields included."""

import gzip
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from support.stored import sample

from kvbench.base.errors import UsageError
from kvbench.report.data import CellResult, Delta, ReportColumn, ReportRow
from kvbench.report.report import Report
from kvbench.report.summary import summarise
from kvbench.store.results import CellRecord, Sample, ScoreSummary

COMMITTED = Path(__file__).parents[2] / "results" / "samples"


@pytest.mark.parametrize("name", ["vatp.longbench_mini.musique", "think.longbench_mini.lcc"])
def test_committed_records_are_the_same_when_written_again(name):
    kinds = {"cell": 0, "sample": 0}
    with gzip.open(COMMITTED / f"{name}.samples.jsonl.gz", "rt", encoding="utf-8") as lines:
        for entry in map(json.loads, lines):
            kind = "cell" if "cell" in entry else "sample"
            again = (CellRecord if kind == "cell" else Sample).read(entry[kind]).record()
            assert json.loads(json.dumps(again)) == entry[kind]
            kinds[kind] += 1
    assert all(kinds.values())


def test_unknown_fields_survive_and_older_lines_lack_some():
    line = sample(3, from_the_future={"a": 1}, provenance=2)
    assert Sample.read(line).record() == {**line, "from_the_future": {"a": 1}}
    for key in ("payload_kv_head", "decode_peak"):
        line.pop(key)
    old = Sample.read(line)
    assert old.payload_kv_head is None and old.decode_peak is None
    assert old.record() == line
    line.pop("full16")
    with pytest.raises(UsageError, match=r"example e3 was measured by an older version"):
        Sample.read(line)
    record = {"id": "a", "label": "b", "column": "c", "of": 3, "identity": {}, "provenance": [{}], "later": 1}
    assert json.loads(json.dumps(CellRecord.read(record).record())) == record


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ({"of": "3"}, "of"),
        ({"provenance": [1]}, "provenance"),
        ({"identity": {"chain": {"per": "kv_head"}}}, "identity"),
        ({"identity": {"chain": {"per": "kv_head", "stages": [{"id": "h2o", "revision": 1}]}}}, "identity"),
    ],
)
def test_a_damaged_record_of_a_cell_is_named(damage, named):
    with pytest.raises(ValueError, match=f"^{named} of it is damaged"):
        CellRecord.read({"id": "a", **damage})


def test_a_summary_is_read_from_what_it_wrote():
    summary = summarise([Sample.read(sample(i)) for i in range(12)], "f1", 20)
    record = json.loads(json.dumps(summary.record()))
    assert "buckets" not in record and record["timing"]["batch_factor"] is None
    read = ScoreSummary.read({"status": "partial", **record})
    assert (read.metric, read.n, read.of, read.score, tuple(read.ci)) == ("f1", 12, 20, summary.score, summary.ci)
    assert ScoreSummary.read({"status": "partial"}) is None


def test_a_report_prints_the_reason_of_a_refusal_and_numbers_beside_the_settings():
    summary = summarise([Sample.read(sample(i)) for i in range(2)], "f1", 4)
    cells = (
        CellResult("code", "1", "refused", reason="lies"),
        CellResult("code", "2", "measured", settings={"per": "kv_head"}, summary=summary, delta=Delta(-1.0, None)),
        CellResult("code", "3", "missing", reason="not run here"),
    )
    columns = (ReportColumn("code", "f1", "", False),) * 3
    report = Report("m", "", columns, (ReportRow("a", False, cells, None),), (), "r").record()
    refused, measured, missing = report["rows"][0]["cells"]
    assert report["verdicts"][0]["outcome"] == "✗ refused in 1 of 3 tasks"
    assert refused == {"task": "code", "cell": "1", "evicts": False, "status": "refused", "reason": "lies"}
    assert "reason" not in missing
    assert (measured["per"], measured["delta"], measured["delta_ci"]) == ("kv_head", -1.0, None)
    assert measured["payload"] == asdict(summary)["payload"]

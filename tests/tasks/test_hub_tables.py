"""The hub's tables, written here with its columns, on the way that a fetch takes: parquet, JSON Lines, loader."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.dataset_files import load

from kvbench.base.errors import UsageError
from kvbench.tasks.fetch import find_source, unpack

PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TABLES = {
    "gsm8k": {"question": ["q1", "q2"], "answer": ["so\n#### 1", "so\n#### 2"]},
    "aime24": {"id": [60, 61], "problem": ["p1", "p2"], "solution": ["s1", "s2"], "answer": ["204", "025"]},
    "theoremqa": {
        "Question": ["q1", "q2", "q3"],
        "Answer": ["[1, 2]", "True", "3.5"],
        "Answer_type": ["list of integer", "bool", "float"],
        "Picture": pa.array([None, {"bytes": b"\x89PNG\xff", "path": "a.png"}, None], PICTURE),
    },
    "truthfulqa": {
        "question": ["q1", "q2"],
        "best_answer": ["b1", "b2"],
        "correct_answers": [["c1", "c2"], ["c3"]],
    },
    "xsum": {"document": ["one\ntwo", "three"], "summary": ["s1", "s2"], "id": ["7", "8"]},
    "cnn_dailymail": {"article": ["one\ntwo", "three"], "highlights": ["s1\ns2", "s3"], "id": ["7", "8"]},
}
REFERENCES = {
    "gsm8k": [("1",), ("2",)],
    "aime24": [("204",), ("025",)],
    "theoremqa": [("[1, 2]",), ("3.5",)],
    "truthfulqa": [("b1", "c1", "c2"), ("b2", "c3")],
    "xsum": [("s1",), ("s2",)],
    "cnn_dailymail": [("s1 s2",), ("s3",)],
}


@pytest.mark.parametrize("dataset", TABLES)
def test_fetched_tables_load(tmp_path, dataset):
    pq.write_table(pa.table(TABLES[dataset]), tmp_path / "table.parquet")
    source = find_source(dataset)
    assert not source.verified and source.repo and source.licence != "unknown"
    for wanted in source.files:
        if wanted.source.endswith(".parquet"):
            unpack(wanted, tmp_path / "table.parquet", tmp_path / wanted.destination)
    (task,) = load(dataset, tmp_path)
    assert [e.answers for e in task.examples] == REFERENCES[dataset]
    if dataset in ("xsum", "cnn_dailymail"):
        (task,) = load(dataset, tmp_path, shots=2)
        assert "###\nArticle: one two\n\n" in task.examples[1].prompt


def test_fetched_files_load(tmp_path):
    line = {"question": "q", "answers": ["a1"], "ctxs": [{"title": "t", "text": "a1", "isgold": True}]}
    (wanted,) = find_source("mdqa").files
    (tmp_path / "x.gz").write_bytes(gzip.compress(json.dumps(line).encode()))
    unpack(wanted, tmp_path / "x.gz", tmp_path / wanted.destination)
    assert load("mdqa", tmp_path, "last", documents=1)[0].examples[0].answers == ("a1",)
    for dataset in ("gpqa", "coqa"):
        (wanted,) = find_source(dataset).files
        (tmp_path / wanted.destination).write_text("{}")
        with pytest.raises(UsageError, match=wanted.destination):
            load(dataset, tmp_path)

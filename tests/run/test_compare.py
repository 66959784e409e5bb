"""Methods compared on a loaded model: rows in, a table, a picture and a DataFrame out."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import kvbench
from kvbench.base.errors import UsageError

pytestmark = pytest.mark.e2e("whole answers")
CONTEXT = "notes: the cold river shines slowly. the magic number of paris is 471. it was a calm night. "
QUESTION = "question: what is the magic number of paris? answer: paris is"
METHODS = ["snapkv+think", "streamingllm", "h2o", "expectedattention", "random"]


def test_entries_with_knobs_of_their_own_are_those_that_prefill_takes(tmp_path):
    model, tokenizer = kvbench.load_model("tiny")
    rows = [{"prompt": CONTEXT + QUESTION, "answers": ["471"]}]
    settings = {"kv_ratio": 0.25, "max_new_tokens": 4, "progress": False, "results": tmp_path}
    entries = [{"method": "snapkv", "kv_ratio": [0.5, 0.4], "window": 8}, "h2o,random", {"method": "h2o"}]
    report = kvbench.compare(model, tokenizer, rows, entries, **settings)
    names = ["full", "snapkv kv_ratio=0.5 window=8", "snapkv kv_ratio=0.4 window=8", "h2o kv_ratio=0.25"]
    assert [row.method for row in report.rows] == [*names, "random kv_ratio=0.25"]
    alone = kvbench.compare(model, tokenizer, rows, ["snapkv"], **{**settings, "kv_ratio": 0.5}, window=8)
    assert alone.rows[1].cells[0].cell == report.rows[1].cells[0].cell


def test_a_folder_that_no_file_system_has_is_refused_by_its_key(tmp_path):
    model, tokenizer = kvbench.load_model("tiny")
    with pytest.raises(UsageError, match=r"results='a.x00b' is not possible: a folder"):
        kvbench.compare(model, tokenizer, ["one"], ["h2o"], results="a\0b")


def test_rows_with_context_and_question_are_compared_and_drawn(tmp_path):
    model, tokenizer = kvbench.load_model("tiny")
    rows = [{"context": CONTEXT, "question": QUESTION, "answers": ["471"]}]
    settings = {"kv_ratio": [0.5, 0.25], "max_new_tokens": 4, "progress": False, "results": tmp_path}
    report = kvbench.compare(model, tokenizer, rows, METHODS, **settings)
    assert [c.task for c in report.columns] == ["file/rows"]
    whole = [{"prompt": CONTEXT + QUESTION, "answers": ["471"]}]
    again = kvbench.compare(model, tokenizer, whole, METHODS, **settings)
    assert report.to_pandas()["score"].tolist() == again.to_pandas()["score"].tolist()
    figure = report.plot()
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    (legend,) = figure.legends
    box = legend.get_window_extent(renderer)
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width, "the legend is cut"
    assert figure.bbox.width >= 640
    explained = " ".join(legend.get_title().get_text().split())
    assert "kv_ratio: the share of a prompt's tokens that is kept" in explained
    assert "ratio: the share of the channels, or of the rank, that is removed" in explained


def test_a_dataframe_and_other_tables_are_the_rows_they_hold(tmp_path):
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    model, tokenizer = kvbench.load_model("tiny")
    rows = [{"prompt": CONTEXT + QUESTION, "answers": ["471", "paris"]}, {"prompt": "one two", "answers": ["three"]}]
    settings = {"max_new_tokens": 2, "progress": False, "results": tmp_path}
    want = kvbench.compare(model, tokenizer, rows, ["snapkv"], **settings)

    class PolarsFrame:
        """The parts of polars' DataFrame that tell it from pandas'."""

        columns = ("prompt", "answers")
        to_dict = dict

        def __iter__(self):
            return iter(self.columns)

        def to_dicts(self):
            return rows

    table = datasets.Dataset.from_list(rows)
    # arrays stand in place of lists here
    frame = table.to_pandas()
    # a table fills what a row lacks
    mixed = pandas.DataFrame([rows[0] | {"max_new_tokens": None}, rows[1] | {"max_new_tokens": float("nan")}])
    for data in (table, frame, mixed, table.data.table, PolarsFrame(), iter(rows), tuple(rows)):
        report = kvbench.compare(model, tokenizer, data, ["snapkv"], **settings)
        assert [row.cells[0].cell for row in report.rows] == [row.cells[0].cell for row in want.rows]
    with pytest.raises(UsageError, match="row 0 of data has text: a row is"):
        kvbench.compare(model, tokenizer, pandas.DataFrame({"text": ["a"]}), **settings)

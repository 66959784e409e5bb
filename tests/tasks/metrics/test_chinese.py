import string
import subprocess
import sys

import jieba
import pytest
from support import metric_reference as slow

from kvbench.base.example import Example
from kvbench.tasks.metrics import score
from kvbench.tasks.metrics.chinese import _MARKS, qa_f1_zh, retrieval_zh, rouge_zh, segment_words

TEXTS = [
    *("厦门大学。", "《热诚传说》动画的结局是百合。", "人民币57081.86元。", "九箱盐，运往磨坊！"),
    *("没有提到", "九 箱\n盐\u3000", "ＡＢＣ，ａｂｃ。", "〈书〉《书》．·‚", "繁體中文與简体中文", "日本語のテキスト"),
    *("salt 盐 mix 混合 123", "盐" * 60, "。。。", "", " ", "\n", "—…—", "👩‍👩‍👧盐🧂"),
    *("老船长把九箱盐运到河边的磨坊。雾里有人在数钟声。", "İ大学ẞ", "\x00盐", "a.b 盐.c"),
]


def test_marks_are_those_of_the_benchmark():
    expected = {chr(c) for r in slow.CHINESE_MARKS for c in r}
    assert set(_MARKS) == expected
    assert "《" not in expected and "》" in expected  # the benchmark's own asymmetry
    assert not expected & set(string.punctuation)


def test_f1_and_rouge_equal_slow_copies():
    shared = 0
    for prediction in TEXTS:
        for reference in TEXTS:
            value = qa_f1_zh(prediction, reference)
            assert value == pytest.approx(slow.f1_zh(prediction, reference), abs=1e-12), (prediction, reference)
            assert rouge_zh(prediction, reference) == pytest.approx(slow.rouge_zh(prediction, reference), abs=1e-12)
            shared += 0 < value < 1
    assert shared > 20


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("厦门大学", "厦门大学。", 1.0),
        ("厦门 大学", "大学", 2 / 3),
        ("ＡＢＣ", "ａｂｃ", 1.0),  # lower case reaches full-width letters
        ("。", "！", 0.0),
        ("《", "书《", 2 / 3),  # an opening title mark stays a word
        ("", "盐", 0.0),
    ],
)
def test_f1_by_hand(prediction, reference, expected):
    assert qa_f1_zh(prediction, reference) == pytest.approx(expected, abs=1e-12)


def test_retrieval_by_hand():
    assert retrieval_zh("段落15或3", "段落15") == 1 / 2
    assert retrieval_zh("段落１５", "段落15") == 0.0  # other digits are other numbers
    assert retrieval_zh("", "段落15") == 0.0
    assert retrieval_zh("15", "Paragraph 15") is None
    assert score("retrieval_zh", "15", Example("0", "", ("Paragraph 15",), 1)) is None


def test_words_that_other_code_teaches_jieba_change_nothing():
    text = "老船长把九箱盐运到河边"
    before = segment_words(text)
    jieba.add_word("九箱盐运", freq=10**9)
    try:
        assert "九箱盐运" in jieba.lcut(text)
        assert segment_words(text) == before
    finally:
        jieba.del_word("九箱盐运")
    assert "".join(before) == text


def test_segmentation_is_quiet():
    code = "from kvbench.tasks.metrics.chinese import qa_f1_zh; print(qa_f1_zh('厦门大学', '厦门大学'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1.0\n"
    assert done.stderr == ""

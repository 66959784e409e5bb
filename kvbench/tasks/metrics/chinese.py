"""LongBench's metrics for Chinese: its English metrics after segmentation by ``jieba``. Scores are in [0, 1].

Source: github.com/THUDM/LongBench metrics.py, github.com/fxsjy/jieba 0.42.1 with its default dictionary.
"""

from __future__ import annotations

import logging
import re
import string
from functools import cache
from typing import Any

from kvbench.tasks.metrics.choice import count
from kvbench.tasks.metrics.rouge import rouge_l
from kvbench.tasks.metrics.text import token_f1

_PARAGRAPH = re.compile(r"段落(\d+)")
# LongBench drops these marks in addition to ASCII's; its list lacks middle dot and em space, so this one does, too
_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠"
    "｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏"
)
_PUNCTUATION = str.maketrans("", "", string.punctuation + _MARKS)


def qa_f1_zh(prediction: str, reference: str) -> float:
    """Return token F1 of the segmented answers. Words are in lower case, without punctuation and whitespace.

    Two answers without words score 0, as in LongBench.
    """
    return token_f1(_list_scored_words(prediction), _list_scored_words(reference))


def rouge_zh(prediction: str, reference: str) -> float:
    """Return ROUGE-L F of the package ``rouge`` over the segmented answers, words joined by spaces, as in LongBench."""
    return rouge_l(" ".join(segment_words(prediction)), " ".join(segment_words(reference)))


def retrieval_zh(prediction: str, reference: str) -> float | None:
    """Return the share of the prediction's numbers that are the N of the reference ``段落N``.

    Returns None for a reference of another form.
    """
    paragraph = _PARAGRAPH.search(reference)
    if paragraph is None:
        return None
    return count(prediction, paragraph[1])


def segment_words(text: str) -> list[str]:
    """Return the words of ``text`` in jieba's accurate mode. Joined, they give the text, whitespace included."""
    return list(_load_segmenter().cut(text, cut_all=False))


def _list_scored_words(text: str) -> list[str]:
    """Return the words of ``text`` without punctuation and whitespace. Empty words are dropped."""
    words = []
    for segmented in segment_words(text):
        # splitting and joining also removes whitespace inside a word, as LongBench's white_space_fix does
        word = "".join(segmented.lower().translate(_PUNCTUATION).split())
        if word:
            words.append(word)
    return words


@cache
def _load_segmenter() -> Any:
    # import jieba on first use, since reading its dictionary takes a second
    import jieba

    # jieba reports on stderr where its cache lies
    jieba.setLogLevel(logging.WARNING)
    # do not use jieba's default segmenter, which is shared: words that other code adds to it would change scores
    segmenter = jieba.Tokenizer()
    segmenter.initialize()
    return segmenter

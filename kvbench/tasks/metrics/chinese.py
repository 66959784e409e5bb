"""LongBench's metrics for Chinese: its English ones after segmentation by ``jieba``. Scores are in [0, 1].

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
# The marks that LongBench drops beside ASCII's; middle dot and em space are not among them, as there.
_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠"
    "｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏"
)
_PUNCTUATION = str.maketrans("", "", string.punctuation + _MARKS)


def qa_f1_zh(prediction: str, reference: str) -> float:
    """Return token F1 of the segmented answers, words in lower case, without punctuation, whitespace and empty words.

    Two answers without words score 0, as in LongBench.
    """
    return token_f1(_words(prediction), _words(reference))


def rouge_zh(prediction: str, reference: str) -> float:
    """Return ROUGE-L F of the package ``rouge`` over the segmented answers, words joined by spaces, as in LongBench."""
    return rouge_l(" ".join(segment(prediction)), " ".join(segment(reference)))


def retrieval_zh(prediction: str, reference: str) -> float | None:
    """Return the share of the prediction's numbers that are the N of the reference ``段落N``; None without an N."""
    paragraph = _PARAGRAPH.search(reference)
    return count(prediction, paragraph[1]) if paragraph else None


def segment(text: str) -> list[str]:
    """Return the words of ``text`` in jieba's accurate mode; together they are the text, whitespace included."""
    return list(_segmenter().cut(text, cut_all=False))


def _words(text: str) -> list[str]:
    bare = ("".join(word.lower().translate(_PUNCTUATION).split()) for word in segment(text))
    return [word for word in bare if word]


@cache
def _segmenter() -> Any:
    # Imported on first use: reading the dictionary takes a second. A segmenter of its own, since words that other
    # code adds to jieba's default one would change scores; quiet, since jieba reports its cache on stderr.
    import jieba

    jieba.setLogLevel(logging.WARNING)
    segmenter = jieba.Tokenizer()
    segmenter.initialize()
    return segmenter

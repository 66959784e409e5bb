"""Every metric by name. To add one: a function of (prediction, reference) and an entry in ``METRICS``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from kvbench.base.errors import unknown
from kvbench.base.example import Example
from kvbench.base.extras import require
from kvbench.tasks.metrics import (
    answers,
    bleu,
    chinese,
    choice,
    code,
    kvpress_match,
    rouge,
    ruler,
    squad,
    text,
    theorem,
)

LONGBENCH = "github.com/THUDM/LongBench metrics.py"
SACREBLEU = "github.com/mjpost/sacrebleu"
RULER = "github.com/NVIDIA/RULER scripts/eval/synthetic/constants.py"
KVPRESS = "github.com/NVIDIA/kvpress evaluation/benchmarks/ruler"
COQA = "stanfordnlp.github.io/coqa"


@dataclass(frozen=True)
class Metric:
    """A rule that scores answers against one reference.

    function: from (prediction, reference, example) to a score in [0, 1], or None if the reference cannot be scored.
    revision: a part of a cell's identity; raise it whenever a score changes.
    scale: the factor from a mean of scores to what tables print.
    needs_classes: the example must carry its closed set of labels.
    shown: the function from a mean to what tables print, where that is no multiple (perplexity).
    whole: from (prediction, example) to a score, where it depends on all references together.
    package: the package that it calls, if that comes with an extra.
    """

    name: str
    description: str
    source: str
    function: Callable[[str, str, Example], float | None]
    revision: int = 1
    scale: float = 100.0
    needs_classes: bool = False
    shown: Callable[[float], float] | None = None
    whole: Callable[[str, Example], float | None] | None = None
    package: str = ""

    def show(self, mean: float) -> float:
        """Return a mean of scores in printed units: ``scale`` times it, or ``shown`` of it where that is set."""
        return self.scale * mean if self.shown is None else self.shown(mean)


def metric(name: str) -> Metric:
    """Return the metric of that name. Raises UsageError with the nearest names if there is none."""
    if name not in METRICS:
        raise unknown("metric", name, METRICS)
    return METRICS[name]


def check_installed(name: str) -> None:
    """Raise UsageError with the command that installs the metric's package if it is missing."""
    if package := metric(name).package:
        require(package, f"metric {name}")


def score(name: str, prediction: str, example: Example) -> float | None:
    """Return the best score in [0, 1] over the references, or the metric's ``whole`` score.

    Returns None if no reference can be scored.
    """
    chosen = metric(name)
    if chosen.whole is not None:
        return chosen.whole(prediction, example)
    scores = [chosen.function(prediction, answer, example) for answer in example.answers]
    return max((s for s in scores if s is not None), default=None)


def _pair(function: Callable[[str, str], float | None]) -> Callable[[str, str, Example], float | None]:
    return lambda prediction, reference, _: function(prediction, reference)


def _named(*metrics: Metric) -> Mapping[str, Metric]:
    return MappingProxyType({m.name: m for m in metrics})


def _likelihood(prediction: str, reference: str, example: Example) -> None:
    """Return no score: likelihoods are measured while the text is read, not from an answer."""


METRICS = _named(
    Metric(
        "perplexity",
        "exp of the mean negative log likelihood per token (lower is better)",
        "kvbench",
        _likelihood,
        shown=math.exp,
    ),
    Metric(
        "word_perplexity",
        "exp of the negative log likelihood per word (lower is better)",
        "kvbench",
        _likelihood,
        shown=math.exp,
    ),
    Metric("f1", "token F1 after SQuAD normalisation (LongBench qa_f1)", LONGBENCH, _pair(text.qa_f1)),
    Metric("rouge_l", "ROUGE-L F of the package rouge, as LongBench calls it", LONGBENCH, _pair(rouge.rouge_l)),
    Metric("rouge_1", "ROUGE-1 F of the package rouge", LONGBENCH, _pair(partial(rouge.rouge_n, n=1))),
    Metric("rouge_2", "ROUGE-2 F of the package rouge", LONGBENCH, _pair(partial(rouge.rouge_n, n=2))),
    Metric(
        "rouge1",
        "ROUGE-1 F of the package rouge-score, stemmed",
        "pypi rouge-score",
        _pair(rouge.rouge1_stem),
        package="rouge_score",
    ),
    Metric("accuracy", "first line equals the label but for case and punctuation", "kvbench", _pair(choice.accuracy)),
    Metric("exact_match", "equal but for whitespace", "kvbench", _pair(text.exact_match)),
    Metric("contains", "reference occurs literally in the answer", "kvbench", _pair(text.contains)),
    Metric(
        "contains_any_case",
        "reference occurs in the answer, whatever its case",
        "github.com/nelson-liu/lost-in-the-middle",
        _pair(text.contains_any_case),
    ),
    Metric("code_sim", "edit similarity of the first code line (Levenshtein)", LONGBENCH, _pair(code.code_sim)),
    Metric(
        "code_sim_difflib",
        "edit similarity of the first code line (difflib, what LongBench does without python-Levenshtein)",
        LONGBENCH,
        lambda prediction, reference, _: code.code_sim(prediction, reference, backend="difflib"),
    ),
    Metric("edit_sim", "Levenshtein ratio of the stripped answers", "kvbench", _pair(code.edit_sim)),
    Metric(
        "classification",
        "right label among the class names found in the answer, over their number",
        LONGBENCH,
        lambda prediction, reference, example: choice.classification(prediction, reference, example.classes),
        needs_classes=True,
    ),
    Metric("gsm8k", "last number after the last colon equals the reference", "kvbench", _pair(answers.gsm8k)),
    Metric(
        "last_integer",
        "last integer of the answer equals the reference",
        "github.com/DachengLi1/LongChat",
        _pair(answers.last_integer),
    ),
    Metric("letter", "the option that the answer chooses is the right one", "kvbench", _pair(answers.letter)),
    Metric(
        "theorem",
        "final answer by type: truth value, option, integer, float within 4 per cent, list",
        "github.com/TIGER-AI-Lab/TheoremQA",
        _pair(theorem.theorem_match),
    ),
    Metric("bleu", "sentence BLEU-4, exponential smoothing, tokenize=intl", SACREBLEU, _pair(bleu.bleu)),
    Metric("squad_f1", "token F1 after SQuAD normalisation, 1 for two empty answers", COQA, _pair(squad.squad_f1)),
    Metric("squad_em", "equal after SQuAD normalisation", "SQuAD evaluate-v1.1.py", _pair(squad.squad_em)),
    Metric(
        "coqa_f1",
        "squad_f1, the best over all references but one, averaged over which one is left out",
        COQA,
        _pair(squad.squad_f1),
        whole=lambda prediction, example: squad.coqa_f1(prediction, example.answers),
    ),
    Metric(
        "best_subspan_em",
        "normalised reference occurs in the normalised answer",
        "github.com/nelson-liu/lost-in-the-middle",
        _pair(squad.best_subspan_em),
    ),
    Metric(
        "string_match_all",
        "share of the references that occur in the answer, whatever their case (RULER's all)",
        RULER,
        _pair(ruler.contained),
        whole=lambda prediction, example: ruler.share_contained(prediction, example.answers),
    ),
    Metric(
        "string_match_part",
        "a reference occurs in the answer, whatever its case (RULER's part)",
        RULER,
        _pair(ruler.contained),
    ),
    Metric(
        "kvpress_all",
        "share of the references that occur in the answer without its line breaks, as kvpress scores RULER",
        KVPRESS,
        lambda prediction, reference, example: kvpress_match.share_contained(prediction, [reference]),
        whole=lambda prediction, example: kvpress_match.share_contained(prediction, example.answers),
    ),
    Metric(
        "kvpress_part",
        "a reference occurs in the answer without its line breaks, as kvpress scores RULER's questions",
        KVPRESS,
        lambda prediction, reference, example: kvpress_match.any_contained(prediction, [reference]),
    ),
    Metric("count", "share of the answer's numbers that are right", LONGBENCH, _pair(choice.count)),
    Metric("retrieval", "share of the answer's numbers that name the paragraph", LONGBENCH, _pair(choice.retrieval)),
    Metric("qa_f1_zh", "token F1 of Chinese segmented by jieba", LONGBENCH, _pair(chinese.qa_f1_zh), package="jieba"),
    Metric(
        "rouge_zh",
        "ROUGE-L F (package rouge) of Chinese segmented by jieba",
        LONGBENCH,
        _pair(chinese.rouge_zh),
        package="jieba",
    ),
    Metric("retrieval_zh", "share of the answer's numbers that name the 段落", LONGBENCH, _pair(chinese.retrieval_zh)),
)

"""Every metric by name. To add one, write a function of (prediction, reference) and an entry in ``METRICS``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
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
    math_equal,
    own,
    rouge,
    ruler,
    squad,
    text,
    theorem,
)
from kvbench.tasks.thoughts import THOUGHT, Thought

LONGBENCH = "github.com/THUDM/LongBench metrics.py"
SACREBLEU = "github.com/mjpost/sacrebleu"
RULER = "github.com/NVIDIA/RULER scripts/eval/synthetic/constants.py"
KVPRESS = "github.com/NVIDIA/kvpress evaluation/benchmarks/ruler"
BLANK_CODE = "a first line of spaces is scored as the code"
COQA = "stanfordnlp.github.io/coqa"


@dataclass(frozen=True)
class Metric:
    """A rule that scores answers against one reference.

    name: the name by which tasks and users choose the metric.
    description: the rule in words, for lists.
    source: the code or the place that defines the rule.
    function: the function from (prediction, reference, example) to a score in [0, 1], or to None if the reference
        cannot be scored.
    revision: a part of a cell's identity. Raise it whenever a score changes.
    scale: the factor from a mean of scores to the printed number.
    needs_classes: True if the example must carry its closed set of labels.
    formula: the function from a mean to the printed number, if a factor is not enough (perplexity); None: ``scale`` is.
    whole: the function from (prediction, example) to a score that depends on all references together; None: the best
        score over single references counts.
    package: the package of an extra that the metric calls; '' for none.
    decided_by: the distribution whose version decides scores, and so is part of a cell's identity; '' for none.
    fault: the fault of the published rule, which is kept, in words; '' for none.
    mended: the metric without that fault; '' for none.
    blank: True if an empty reference means that the right answer is empty. Other metrics need some text.
    digest: the hash of the source of a metric of one's own; '' for kvbench's.
    lengths: True if answers are worked solutions, so that their mean length is shown beside their score.
    """

    name: str
    description: str
    source: str
    function: Callable[[str, str, Example], float | None]
    revision: int = 1
    scale: float = 100.0
    needs_classes: bool = False
    formula: Callable[[float], float] | None = None
    whole: Callable[[str, Example], float | None] | None = None
    package: str = ""
    decided_by: str = ""
    fault: str = ""
    mended: str = ""
    blank: bool = False
    digest: str = ""
    lengths: bool = False

    def identity(self) -> dict[str, object]:
        """Return the facts that decide the metric's scores, for a cell's identity."""
        facts: dict[str, object] = {"name": self.name, "revision": self.revision}
        # only some metrics have this key, so that the cells of all others keep their ids
        if self.decided_by:
            facts[self.decided_by] = version(self.decided_by)
        if self.digest:
            facts["source"] = self.digest
        return facts

    def show(self, mean: float) -> float:
        """Return a mean of scores in printed units: ``formula(mean)`` if that is set, else ``scale * mean``."""
        if self.formula is not None:
            return self.formula(mean)
        return self.scale * mean


def choose(written: str) -> Metric:
    """Return the metric that a user named: one of METRICS, or ``FILE.py:NAME``, a function of their own.

    Raises UsageError as ``metric`` and ``own.load`` do.
    """
    return metric(own.load(written) if own.is_own(written) else written)


def metric(name: str) -> Metric:
    """Return the metric of that name. Raises UsageError with the nearest names if there is none.

    A metric of one's own that this process has not read, such as that of a stored result, only shows means.
    """
    if own.is_own(name):
        read = own.LOADED.get(name)
        if read is None:
            return Metric(name, "a metric of one's own", name, _score_nothing)
        return Metric(name, read.description, name, read.score, digest=read.digest, blank=True)
    if name not in METRICS:
        hint = "A function of your own: metric=FILE.py:NAME."
        raise unknown("metric", name, METRICS, hint, listed_by="kvbench list metrics")
    return METRICS[name]


def check_installed(name: str) -> None:
    """Raise UsageError with the command that installs the metric's package if it is missing."""
    package = metric(name).package
    if package:
        require(package, f"metric {name}")


def score(
    name: str, prediction: str, example: Example, *, cut: Callable[[str], str] = str, thought: Thought = THOUGHT
) -> float | None:
    """Return the best score in [0, 1] of a prediction over the example's references, or the metric's ``whole`` score.

    name: the name of the metric.
    prediction: the generated text. Its thought is taken off first, and one that ends inside its thought is empty.
    cut: the function from the text without thought to the part of it that is scored.
    thought: the marks of thoughts.

    Returns None if no reference can be scored.
    """
    chosen = metric(name)
    prediction = cut(thought.find_answer(prediction) or "")
    if chosen.whole is not None:
        return chosen.whole(prediction, example)
    scores = []
    for reference in example.answers:
        score_or_none = chosen.function(prediction, reference, example)
        # a reference that cannot be scored does not make the answer wrong
        if score_or_none is not None:
            scores.append(score_or_none)
    # the best reference counts, as in all sources
    return max(scores, default=None)


def by_pair(function: Callable[[str, str], float | None]) -> Callable[[str, str, Example], float | None]:
    """Turn a metric of (prediction, reference) into one of (prediction, reference, example)."""

    def score_pair(prediction: str, reference: str, example: Example) -> float | None:
        return function(prediction, reference)

    return score_pair


def _by_all_references(
    function: Callable[[str, Sequence[str]], float | None],
) -> Callable[[str, Example], float | None]:
    """Turn a metric of (prediction, all references) into one of (prediction, example)."""

    def score_example(prediction: str, example: Example) -> float | None:
        return function(prediction, example.answers)

    return score_example


def _by_single_reference(
    function: Callable[[str, Sequence[str]], float | None],
) -> Callable[[str, str, Example], float | None]:
    """Turn a metric of (prediction, references) into one of (prediction, reference, example).

    Each reference is scored alone. ``score`` then takes the best.
    """

    def score_reference(prediction: str, reference: str, example: Example) -> float | None:
        return function(prediction, [reference])

    return score_reference


def _score_classification(
    prediction: str, reference: str, example: Example, *, examine_all: bool = False
) -> float | None:
    """Return LongBench's classification score among the example's classes; None if the example has no classes."""
    return choice.classification(prediction, reference, example.classes, examine_all=examine_all)


def _score_nothing(prediction: str, reference: str, example: Example) -> None:
    """Return None: a likelihood is measured while the text is read, and a stored score was given when it was."""


# lists show metrics in this order. A description says what an answer must share with its reference, and ``source``
# names the code or the place that defines the metric
_METRICS = (
    # likelihoods: the mean of log losses is exponentiated only when it is printed
    Metric(
        "perplexity",
        "exp of the mean negative log likelihood per token (lower is better)",
        "kvbench",
        _score_nothing,
        formula=math.exp,
    ),
    Metric(
        "word_perplexity",
        "exp of the negative log likelihood per word (lower is better)",
        "kvbench",
        _score_nothing,
        formula=math.exp,
    ),
    # metrics over the words of an answer
    Metric("f1", "token F1 after SQuAD normalisation (LongBench qa_f1)", LONGBENCH, by_pair(text.qa_f1)),
    Metric("rouge_l", "ROUGE-L F of the package rouge, as LongBench calls it", LONGBENCH, by_pair(rouge.rouge_l)),
    Metric("rouge_1", "ROUGE-1 F of the package rouge", LONGBENCH, by_pair(partial(rouge.rouge_n, n=1))),
    Metric("rouge_2", "ROUGE-2 F of the package rouge", LONGBENCH, by_pair(partial(rouge.rouge_n, n=2))),
    Metric(
        "rouge1",
        "ROUGE-1 F of the package rouge-score, stemmed",
        "pypi rouge-score",
        by_pair(rouge.rouge1_stem),
        package="rouge_score",
    ),
    # metrics of equality and containment
    Metric("accuracy", "first line is the label, apart from case and punctuation", "kvbench", by_pair(choice.accuracy)),
    Metric("exact_match", "equal apart from whitespace", "kvbench", by_pair(text.exact_match)),
    Metric("contains", "reference occurs literally in the answer", "kvbench", by_pair(text.contains)),
    Metric(
        "contains_any_case",
        "reference occurs in the answer, whatever its case",
        "github.com/nelson-liu/lost-in-the-middle",
        by_pair(text.contains_any_case),
    ),
    # metrics of code
    Metric(
        "code_sim",
        "edit similarity of the first code line (Levenshtein)",
        LONGBENCH,
        by_pair(code.code_sim),
        fault=BLANK_CODE,
        mended="code_sim_mended",
    ),
    Metric(
        "code_sim_mended",
        "code_sim of the first line that is not blank",
        "kvbench",
        by_pair(partial(code.code_sim, skip_blank=True)),
    ),
    Metric(
        "code_sim_difflib",
        "edit similarity of the first code line (difflib, what LongBench does without python-Levenshtein)",
        LONGBENCH,
        by_pair(partial(code.code_sim, backend="difflib")),
        fault=BLANK_CODE,
        mended="code_sim_difflib_mended",
    ),
    Metric(
        "code_sim_difflib_mended",
        "code_sim_difflib of the first line that is not blank",
        "kvbench",
        by_pair(partial(code.code_sim, backend="difflib", skip_blank=True)),
    ),
    Metric("edit_sim", "Levenshtein ratio of the stripped answers", "kvbench", by_pair(code.edit_sim)),
    # final answers: numbers, or out of a closed set
    Metric(
        "classification",
        "if the answer names the right class: 1 over the number of classes that it names, else 0",
        LONGBENCH,
        _score_classification,
        needs_classes=True,
        fault="a class whose name is a part of the right one's may count as found",
        mended="classification_mended",
    ),
    Metric(
        "classification_mended",
        "classification, with each name in the answer examined",
        "kvbench",
        partial(_score_classification, examine_all=True),
        needs_classes=True,
    ),
    Metric(
        "gsm8k",
        "the final answer behind ####, in \\boxed{} or behind 'answer is', else the last number, equals the reference",
        "kvbench",
        by_pair(answers.gsm8k),
    ),
    Metric(
        "last_integer",
        "last integer of the answer equals the reference",
        "github.com/DachengLi1/LongChat",
        by_pair(answers.last_integer),
    ),
    Metric(
        "letter",
        "the option that the answer chooses is the right one",
        "kvbench",
        by_pair(answers.letter),
        revision=2,
    ),
    Metric(
        "theorem",
        "final answer by type: truth value, option, integer, float within 4 per cent, list",
        "github.com/TIGER-AI-Lab/TheoremQA",
        by_pair(theorem.theorem_match),
        revision=2,
    ),
    Metric(
        "math_equal",
        "the last \\boxed{} of the answer equals the reference by math-verify",
        "github.com/huggingface/Math-Verify",
        by_pair(math_equal.math_equal),
        revision=2,
        package="math_verify",
        decided_by="math-verify",
        lengths=True,
    ),
    # metrics of question answering
    Metric("bleu", "sentence BLEU-4, exponential smoothing, tokenize=intl", SACREBLEU, by_pair(bleu.bleu)),
    Metric(
        "squad_f1",
        "token F1 after SQuAD normalisation, 1 for two empty answers",
        COQA,
        by_pair(squad.squad_f1),
        blank=True,
    ),
    Metric(
        "squad_em", "equal after SQuAD normalisation", "SQuAD evaluate-v1.1.py", by_pair(squad.squad_em), blank=True
    ),
    Metric(
        "coqa_f1",
        "squad_f1 with the best of all references but one, averaged over the one that is left out",
        COQA,
        by_pair(squad.squad_f1),
        whole=_by_all_references(squad.coqa_f1),
        blank=True,
    ),
    Metric(
        "best_subspan_em",
        "normalised reference occurs in the normalised answer",
        "github.com/nelson-liu/lost-in-the-middle",
        by_pair(squad.best_subspan_em),
    ),
    # RULER's metrics, once by its own script and once by kvpress
    Metric(
        "string_match_all",
        "share of the references that occur in the answer, whatever their case (RULER's all)",
        RULER,
        by_pair(ruler.contained),
        whole=_by_all_references(ruler.share_contained),
    ),
    Metric(
        "string_match_part",
        "a reference occurs in the answer, whatever its case (RULER's part)",
        RULER,
        by_pair(ruler.contained),
    ),
    Metric(
        "kvpress_all",
        "share of the references that occur in the answer without its line breaks, as kvpress scores RULER",
        KVPRESS,
        _by_single_reference(kvpress_match.share_contained),
        whole=_by_all_references(kvpress_match.share_contained),
    ),
    Metric(
        "kvpress_part",
        "a reference occurs in the answer without its line breaks, as kvpress scores RULER's questions",
        KVPRESS,
        _by_single_reference(kvpress_match.any_contained),
    ),
    # LongBench's metrics of synthetic tasks and of Chinese
    Metric("count", "share of the answer's numbers that are right", LONGBENCH, by_pair(choice.count)),
    Metric("retrieval", "share of the answer's numbers that name the paragraph", LONGBENCH, by_pair(choice.retrieval)),
    Metric("qa_f1_zh", "token F1 of Chinese, cut by jieba", LONGBENCH, by_pair(chinese.qa_f1_zh), package="jieba"),
    Metric(
        "rouge_zh",
        "ROUGE-L F (package rouge) of Chinese, cut by jieba",
        LONGBENCH,
        by_pair(chinese.rouge_zh),
        package="jieba",
    ),
    Metric(
        "retrieval_zh", "share of the answer's numbers that name the 段落", LONGBENCH, by_pair(chinese.retrieval_zh)
    ),
)
METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _METRICS})
"""All metrics by name."""

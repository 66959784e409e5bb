"""Metrics of question answering over passages after SQuAD's normalisation. Scores are in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.tasks.metrics.text import normalise_answer, token_f1


def squad_f1(prediction: str, reference: str) -> float:
    """Return token F1 of the normalised answers. If one of them is empty, the score is 1 if both are empty, else 0.

    The score differs from LongBench's ``f1`` only for two empty answers. Source: compute_f1 of
    stanfordnlp.github.io/coqa evaluate-v1.0.py. That script's score of a turn is ``coqa_f1``.
    """
    words, reference_words = normalise_answer(prediction).split(), normalise_answer(reference).split()
    if not words or not reference_words:
        # precision or recall would divide by 0; two empty answers agree
        return float(words == reference_words)
    return token_f1(words, reference_words)


def squad_em(prediction: str, reference: str) -> float:
    """Return 1 if both answers are equal once normalised, else 0. Source: SQuAD's evaluate-v1.1.py."""
    return float(normalise_answer(prediction) == normalise_answer(reference))


def coqa_f1(prediction: str, references: Sequence[str]) -> float | None:
    """Return CoQA's score of a turn: the best ``squad_f1`` over all references but one, averaged over the one left out.

    This makes the score comparable with an annotator's, since an annotator is compared with the other annotators. Equal
    references count separately. A single reference is not left out. Returns None without references. Source:
    stanfordnlp.github.io/coqa evaluate-v1.0.py.
    """
    scores = [squad_f1(prediction, reference) for reference in references]
    if not scores:
        return None
    if len(scores) == 1:
        return scores[0]
    # mean over i of max over j != i of F1(prediction, reference j)
    best_without = [max(scores[:i] + scores[i + 1 :]) for i in range(len(scores))]
    return sum(best_without) / len(scores)


def best_subspan_em(prediction: str, reference: str) -> float | None:
    """Return 1 if the normalised reference is a part of the normalised prediction, even inside a word, else 0.

    Returns None for a reference that normalisation leaves empty. Source: github.com/nelson-liu/lost-in-the-middle
    metrics.py.
    """
    expected = normalise_answer(reference)
    if not expected:
        return None  # an empty text is a part of every prediction
    return float(expected in normalise_answer(prediction))

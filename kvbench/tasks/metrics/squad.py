"""Metrics of question answering over passages after SQuAD's normalisation. Scores are in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.tasks.metrics.text import normalise_answer, token_f1


def squad_f1(prediction: str, reference: str) -> float:
    """Return token F1 of the normalised answers; if one of them is empty, 1 if both are, else 0.

    Differs from LongBench's ``f1`` only where both are empty. Source: compute_f1 of stanfordnlp.github.io/coqa
    evaluate-v1.0.py, whose score of a turn is ``coqa_f1``.
    """
    words, reference_words = normalise_answer(prediction).split(), normalise_answer(reference).split()
    return token_f1(words, reference_words) if words and reference_words else float(words == reference_words)


def squad_em(prediction: str, reference: str) -> float:
    """Return 1 if both answers are equal once normalised, else 0. Source: SQuAD's evaluate-v1.1.py."""
    return float(normalise_answer(prediction) == normalise_answer(reference))


def coqa_f1(prediction: str, references: Sequence[str]) -> float | None:
    """Return CoQA's score of a turn: the best ``squad_f1`` over all references but one, averaged over the one left out.

    So each annotator is compared with the others as a system is; equal references count separately. A single reference
    is not left out. Returns None without references. Source: stanfordnlp.github.io/coqa evaluate-v1.0.py.
    """
    scores = [squad_f1(prediction, reference) for reference in references]
    if len(scores) < 2:
        return scores[0] if scores else None
    return sum(max(scores[:i] + scores[i + 1 :]) for i in range(len(scores))) / len(scores)


def best_subspan_em(prediction: str, reference: str) -> float | None:
    """Return 1 if the normalised reference is a part of the normalised prediction, even inside a word, else 0.

    Returns None for a reference that normalisation leaves empty, which is a part of every text. Source:
    github.com/nelson-liu/lost-in-the-middle metrics.py.
    """
    expected = normalise_answer(reference)
    return float(expected in normalise_answer(prediction)) if expected else None

"""Texts that are fed to the caches of one prompt: their likelihood, and their divergence from the full cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite

import torch

from kvbench.base.example import Example, ScoredText
from kvbench.engine.batch import Answer
from kvbench.engine.decode import generate_rows
from kvbench.engine.divergence import Divergence
from kvbench.engine.likelihood import Forced, diverge, teacher_force
from kvbench.engine.limits import find_longest_text
from kvbench.engine.memory import run_in_parts
from kvbench.engine.stopping import Ending, StopTexts
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.models.interface import synchronise
from kvbench.run.answers import QueuedRow
from kvbench.run.host import Host
from kvbench.store.fidelity import TOKENS, TextFidelity, join_texts
from kvbench.tasks.encoding import EncodedTurns
from kvbench.tasks.prompt import Encoded

COMPARED_AT_ONCE = 12
"""The most rows that are compared at once: each takes memory for its logits, and more at once gain nothing."""

Scored = tuple[float, Answer, QueuedRow]
"""The score of a text under one cache, the text as an answer that was forced, and the row with its fidelity."""


def score_text(
    host: Host, text: ScoredText, rows: Sequence[QueuedRow], full: PromptCache | None
) -> list[tuple[QueuedRow, Scored | Exception]]:
    """Score the tokens of ``text`` behind its prefix under the cache of each row.

    The score is the sum of the tokens' losses in nats, over ``text.divisor``. If ``full`` is given, each row is also
    compared with this cache, and keeps the comparison. Return each row with its score, or with the exception by which
    the row failed.

    rows: rows whose caches have read the text's prefix.
    """
    if not rows:
        return []
    # a row that fails is scored alone, so that the others keep their score
    return run_in_parts(rows, partial(_score_together, host, text, full))


def _score_together(host: Host, text: ScoredText, full: PromptCache | None, rows: Sequence[QueuedRow]) -> list[Scored]:
    """Return the score of the text under each of ``rows``, computed in one pass. ``score_text`` explains the rest."""
    # [T]: the tokens behind the compressed prefix, which are fed and scored
    fed_ids = torch.tensor(text.ids[text.prefix :])
    # predictions count behind the token at this index of ``fed_ids``: all of them unless the text is a window whose
    # first tokens are only read
    first = 0
    if text.scored_from is not None:
        first = max(0, text.scored_from - text.prefix)
    synchronise(host.model.device)
    start = time.perf_counter()
    caches = [row.cache for row in rows]
    compared_rows = list(rows)
    if full is None:
        results = teacher_force(host.model, caches, fed_ids, text.chunk)
    else:
        results, floor = diverge(host.model, full, caches, fed_ids)
        for i, (row, result) in enumerate(zip(rows, results, strict=True)):
            fidelity = dict(row.fidelity or {})
            fidelity["reference"] = _build_window_fidelity(result, floor, first, text.document)
            compared_rows[i] = replace(row, fidelity=fidelity)
    synchronise(host.model.device)
    # the rows share the pass; charge each an equal part
    seconds = (time.perf_counter() - start) / len(rows)
    scored = []
    for result, row in zip(results, compared_rows, strict=True):
        # losses[i] is the loss of token i of ``fed_ids``. If the window's first half is fed, too, the token at
        # ``first`` makes the first prediction that counts, which is that of the token behind it
        counted_losses = result.losses[first + 1 :] if first else result.losses
        loss = float(counted_losses.sum())
        answer = Answer(
            tokens=fed_ids.tolist(),
            held=result.held,
            seconds=seconds,
            rows=len(rows),
            stored=result.stored,
            finite=isfinite(loss),
        )
        # loss / divisor: the negative log likelihood of a token, word or byte, as the task counts them
        scored.append((loss / text.divisor, answer, row))
    return scored


def compare_with_full(
    host: Host, example: Example, encoded: Encoded, *, rows: Sequence[QueuedRow], full: PromptCache, most: int
) -> list[tuple[QueuedRow, QueuedRow | Exception]]:
    """Compare each row with the cache ``full`` of the same prompt on texts of up to ``most`` tokens after the prompt.

    Return each row beside a copy with its divergences, or beside the exception by which the row failed.
    """
    if isinstance(encoded, EncodedTurns):
        return compare_answers(host, rows, full, encoded, most)
    try:
        texts = choose_texts(host, example, full, most)
    # without texts no row can be compared
    except Exception as error:
        return [(row, error) for row in rows]
    return compare_rows(host, rows, full, texts)


def compare_rows(
    host: Host, rows: Sequence[QueuedRow], full: PromptCache, texts: Mapping[str, Sequence[int]]
) -> list[tuple[QueuedRow, QueuedRow | Exception]]:
    """Compare each row with the cache ``full`` of the same prompt on texts that continue the prompt.

    Return each row beside a copy with its divergences, or beside the exception by which the row failed.

    texts: the tokens of each text by its kind, as ``choose_texts`` returns them.
    """

    def compare_together(part: Sequence[QueuedRow]) -> list[QueuedRow]:
        caches = [row.cache for row in part]
        # each row has its comparisons by kind of text
        fidelities: list[dict[str, TextFidelity]] = [{} for _ in part]
        for kind, tokens in texts.items():
            results, floor = diverge(host.model, full, caches, torch.tensor(tokens))
            for fidelity, result in zip(fidelities, results, strict=True):
                fidelity[kind] = _build_window_fidelity(result, floor)
        return [replace(row, fidelity=fidelity) for row, fidelity in zip(part, fidelities, strict=True)]

    return _compare_in_parts(rows, compare_together)


def compare_answers(
    host: Host, rows: Sequence[QueuedRow], full: PromptCache, questions: EncodedTurns, most: int = TOKENS
) -> list[tuple[QueuedRow, QueuedRow | Exception]]:
    """Compare each row with the cache ``full`` of the same context on the reference answers to isolated questions.

    A question and its reference continue the context's cache. Only the reference's tokens count, up to ``most`` of
    them. All references of a context make one text of the kind ``reference``. Return each row beside a copy with this
    comparison, or beside the exception by which the row failed.
    """
    limit = find_longest_text(host.model)
    texts = []
    for question, reference in zip(questions.questions, questions.references, strict=True):
        answer = list(reference[:most])
        if limit is not None:
            # the model reads no further than that
            answer = answer[: max(0, limit - full.seen - len(question))]
        if answer:
            texts.append((list(question), answer))

    def compare_together(part: Sequence[QueuedRow]) -> list[QueuedRow]:
        caches = [r.cache for r in part]
        answers: list[list[TextFidelity]] = [[] for _ in part]
        for question, answer in texts:
            forced, floor = diverge(host.model, full, caches, torch.tensor(question + answer))
            for compared, result in zip(answers, forced, strict=True):
                # position i compares the predictions of token i + 1, so the answer begins at the question's last token
                compared.append(_build_window_fidelity(result, floor, first=len(question) - 1))
        records = [{"reference": join_texts(compared)} if compared else {} for compared in answers]
        return [replace(row, fidelity=record) for row, record in zip(part, records, strict=True)]

    return _compare_in_parts(rows, compare_together)


def _compare_in_parts(
    rows: Sequence[QueuedRow], compare_together: Callable[[Sequence[QueuedRow]], Sequence[QueuedRow]]
) -> list[tuple[QueuedRow, QueuedRow | Exception]]:
    """Return each row beside its result of ``compare_together``, or beside the exception by which the row failed."""
    outcomes = []
    # a row that fails is compared alone, so that the others keep their comparison
    for start in range(0, len(rows), COMPARED_AT_ONCE):
        outcomes += run_in_parts(rows[start : start + COMPARED_AT_ONCE], compare_together)
    return outcomes


def choose_texts(host: Host, example: Example, full: PromptCache, most: int = TOKENS) -> dict[str, list[int]]:
    """Return the token ids of the texts on which caches are compared, by kind. Each has two to ``most`` tokens.

    ``reference`` is the first reference of an example with answers. ``greedy`` is the full cache's own likeliest
    answer. The prompt alone predicts a text's first token, so a text of one token compares nothing and is left out.
    """
    longest = find_longest_text(host.model)
    if longest is not None:
        # the text continues the prompt, and the model reads no further than that
        most = min(most, longest - full.seen)
    texts = {}
    if example.answers and example.scored is None:
        # a space separates the reference from the prompt, as it would an answer
        texts["reference"] = host.tokenizer.encode(f" {example.answers[0]}", add_special_tokens=False)[:most]
    # a window of a long text is only scored; its prompt asks for no answer
    if example.scored is None or example.scored.scored_from is None:
        # without a temperature, tokens are the likeliest ones
        limit = min(most, example.max_new_tokens)
        ending = Ending(limit, stop=host.stop, texts=StopTexts(host.stop_texts, host.tokenizer))
        (answer,) = generate_rows(host.model, [full], [ending])
        texts["greedy"] = answer.tokens
    return {kind: tokens for kind, tokens in texts.items() if len(tokens) > 1}


def _build_window_fidelity(forced: Forced, floor: Divergence, first: int = 0, document: str = "") -> TextFidelity:
    """Return the comparison of a row with the full cache as it is stored. Positions that do not count are dropped.

    forced: the row's losses and its divergence from the full cache, at each token of the text.
    floor: the divergence from the full cache of the same cache with changed last places, at each compared position.
    first: the number of compared positions before the first that counts.
    document: the document of which the text is a window; '' if it is not a window.
    """
    divergence = forced.divergence
    # ``diverge`` compares every row that it returns
    assert divergence is not None
    # the prompt alone predicts the first token, so losses have one position more than divergences
    loss = float(forced.losses[first + 1 :].double().sum())
    mean_floor = float(floor.kl[first:].mean())
    return build_text_fidelity(divergence, loss, mean_floor, first, document)


def build_text_fidelity(
    divergence: Divergence, loss: float, floor: float, first: int = 0, document: str = ""
) -> TextFidelity:
    """Return the comparison of one row with the full cache on one text, as it is stored with a sample.

    divergence: the comparison at each position of the text.
    loss: the sum of -ln q in nats over the positions that count. q is the row's probability of the true token.
    floor: the mean divergence in nats that rounding alone makes.
    first: the first position that counts. Earlier ones are not stored.
    document: the document of which the text is a window; '' if it is not a window.
    """
    return TextFidelity(
        # four digits are enough for any statistic, and keep the files small
        kl=tuple(float(f"{nats:.4g}") for nats in divergence.kl[first:].tolist()),
        same="".join("1" if same else "0" for same in divergence.same[first:].tolist()),
        log_ratio=float(divergence.log_ratio[first:].sum()),
        shift=float(divergence.shift[first:].square().sum()),
        loss=loss,
        floor=floor,
        document=document,
    )

"""Find methods that compressed nothing: their cache and their answers are the full cache's."""

from __future__ import annotations

from collections.abc import Mapping

from kvbench.methods.core.chain import Chain
from kvbench.store.cell import Cell
from kvbench.store.fidelity import diverges
from kvbench.store.results import Sample
from kvbench.store.sample_reader import SampleReader

UNCHANGED = 0.99
"""The share of prompts on which a method must do what the full cache does for its row to say so."""


def is_unchanged(cell: Cell, samples: Mapping[str, Sample], reader: SampleReader) -> bool:
    """Return True if a method compressed nothing: for UNCHANGED of prompts, cache and answer equal the full cache's.

    samples: the cell's samples by example. The full cache's are read from the store, whichever run measured them.

    Return False if no prompt has an answer of the full cache, and for a method that fails ``only_compresses``.
    """
    if not only_compresses(cell.chain):
        return False
    if not any(_keeps_all_tokens(sample) for sample in samples.values()):
        # most methods drop tokens of every prompt: then the full cache's answers need not be read
        return False
    full_samples = reader.read(cell.full.id)
    by_query_head = cell.chain.per == "query_head"
    equal = []
    for example, sample in samples.items():
        if example in full_samples:
            equal.append(same_as_full(sample, full_samples[example], by_query_head))
    return bool(equal) and sum(equal) >= UNCHANGED * len(equal)


def only_compresses(chain: Chain) -> bool:
    """Return True if equal tokens, bytes and answers prove that the method did nothing.

    They prove nothing for a method that holds all tokens but attends only some, or that shares logits among heads.
    """
    if chain.is_full or chain.masks or chain.sharer is not None:
        return False
    # A sample stores only the largest layer's token count while decoding. Frozen layers hold all tokens, so that count
    # equals the full cache's even if the other layers evict.
    return not (chain.evicts and any(getattr(stage, "frozen_layers", ()) for stage in chain.stages))


def _keeps_all_tokens(sample: Sample) -> bool:
    return sample.kept >= sample.n


def same_as_full(sample: Sample, full: Sample, by_query_head: bool = False) -> bool:
    """Return True if a method's sample holds no fewer tokens and bytes than the full cache's, and answers alike.

    With ``by_query_head``, keys and values were repeated for query heads, so the full cache's count as often.
    """
    # the most tokens held while decoding; None if the stored line lacks it
    holds_all_while_decoding = (sample.decode_peak or 0) >= (full.decode_peak or 0)
    full_payload = full.payload16
    # results of older versions lack the payloads by kind of head
    if by_query_head and full.payload_kv_head and full.payload_query_head:
        full_payload *= full.payload_query_head / full.payload_kv_head
    keeps_tokens = _keeps_all_tokens(sample) and holds_all_while_decoding
    keeps_bytes = sample.payload16 >= full_payload
    answers_alike = sample.prediction == full.prediction and sample.score == full.score
    # the next-token distributions on texts, if they were compared with the full cache's
    differs_on_texts = any(diverges(text) for text in (sample.fidelity or {}).values())
    return keeps_tokens and keeps_bytes and answers_alike and not differs_on_texts

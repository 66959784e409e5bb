"""The host of a run: a loaded model with the run's settings for prompts and answers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from kvbench.base.example import Example
from kvbench.engine.batch import default_rows
from kvbench.engine.memory import GIB
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.shared_prefix import SharedPrefix
from kvbench.engine.stopping import Ending, StopTexts
from kvbench.kv.model_shape import CacheShape
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.models.interface import cache_shape
from kvbench.plan.config import Sampling
from kvbench.tasks.base import Task, Tokenizer
from kvbench.tasks.encoding import encode_prompt
from kvbench.tasks.prompt import Encoded, PromptPolicy, tokenize_plain


@dataclass(frozen=True)
class Host:
    """A loaded model with its tokenizer and its settings for prompts and answers.

    model: the model. Its device and dtype are the run's.
    tokenizer: the model's tokenizer.
    policy: how prompts are built.
    stop: the token ids that end an answer.
    stop_texts: the model's texts that end an answer.
    context: the tokens of the longest text that the model can read; None if unlimited.
    sampling: the temperature, top_p and seed with which answers are drawn.
    batch_rows: the most rows decoded together; None for the device's default.
    plain: whether prompts are read with eager attention.
    memory: the bytes that the caches of a decode batch may take.
    prefix: the first tokens of the previous prompt, if prompts that begin alike share them.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    policy: PromptPolicy
    stop: frozenset[int]
    context: int | None
    stop_texts: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    batch_rows: int | None = None
    plain: bool = False
    memory: int = 2 * GIB
    prefix: SharedPrefix | None = None

    def shape(self) -> CacheShape:
        """Return the sizes by which the model's cache is audited."""
        return cache_shape(self.model)

    @property
    def most_rows(self) -> int:
        """The most rows that are decoded together."""
        return self.batch_rows or default_rows(self.model.device)

    def encode(self, example: Example, task: Task) -> Encoded:
        """Return the token ids that the model reads: an example's prompt, or the prefix of a text that is scored."""
        return encode_prompt(self.tokenizer, example, task, self.policy, self.context)

    def prefill(
        self, ids: Sequence[int], chains: Sequence[Chain], lengths: Sequence[int] | None = None
    ) -> list[PromptCache]:
        """Read a prompt once and return its cache under each chain.

        lengths: how many of the prompt's first tokens each chain's cache covers; None: all tokens.
        """
        return prefill_chains(
            self.model,
            # [tokens]: one prompt without padding, so that methods see only tokens of the prompt
            torch.tensor(ids),
            chains,
            plain=self.plain,
            tokenizer=self.tokenizer,
            lengths=lengths,
            prefix=self.prefix,
        )

    def make_ending(self, task: Task, example: Example) -> Ending:
        """Return how an answer's tokens are drawn and when the answer ends. The seed depends on the example alone."""
        sampling = self.sampling
        return Ending(
            limit=example.max_new_tokens,
            stop=self.stop,
            texts=StopTexts((*self.stop_texts, *task.stop), self.tokenizer),
            # the user can only raise the task's own number
            min_new_tokens=max(task.min_new_tokens, self.policy.min_new_tokens or 0),
            forbid_first=StopTexts(task.forbid_first, self.tokenizer),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            # hash the id, since Python's own hash of a text differs from process to process
            seed=zlib.crc32(f"{sampling.sample_seed}/{example.id}".encode()),
        )

    def cut_answer(self, tokens: Sequence[int], ending: Ending, keep_special: bool = False) -> tuple[list[int], str]:
        """Return (an answer's tokens without its end, the answer's text).

        keep_special: True to keep special tokens in the text, such as the marks of a thought.
        """
        kept, rest = ending.cut(tokens)
        text = self.tokenizer.decode(kept, skip_special_tokens=not keep_special) + rest
        if rest:
            # the end begins inside a token, so that the tokens are those of the text that was cut
            kept = tokenize_plain(self.tokenizer, text)
        return kept, text

    def describe_batching(self) -> dict[str, object]:
        """Return how rows are batched, for the provenance. Batching affects how numbers are rounded."""
        facts: dict[str, object] = {
            "rows": self.most_rows,
            "order": "by example, then by cell; rows enter as others leave",
        }
        if self.prefix is not None:
            # reading a prompt in pieces also changes how its sums are rounded
            facts["shared_prefix"] = self.prefix.size
        return facts

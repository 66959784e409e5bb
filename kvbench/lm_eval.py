"""A model of lm-evaluation-harness that answers from compressed caches: ``--model kvbench``.

lm-eval finds models only in its own registry. ``python -m kvbench.lm_eval`` is its command line with this model
registered. In Python, importing this module registers the model. Loading, tokenisation, truncation, stopping and
scoring are those of its ``hf`` model (github.com/EleutherAI/lm-evaluation-harness lm_eval/models/huggingface.py). Only
the cache is kvbench's, so that ``method=full`` gives the scores of ``hf``.
"""

from __future__ import annotations

import inspect
import operator
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

import torch

from kvbench import api
from kvbench.audit.prompt_audit import MeasuredBytes
from kvbench.base.conf import entries
from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.extras import missing
from kvbench.base.formatting import format_percent
from kvbench.base.visible import say
from kvbench.engine.hf_cache import TransformersCache
from kvbench.engine.likelihood import compute_forced_logits
from kvbench.engine.shared_prefix import SharedPrefix
from kvbench.methods.core.chain import Chain
from kvbench.models import checkpoint, traits
from kvbench.models.fetch import own_packages
from kvbench.models.load import load_model
from kvbench.models.releases import named_cache
from kvbench.report.unchanged import UNCHANGED, only_compresses
from kvbench.tasks.thoughts import THOUGHT, read_thought

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError:
    raise missing("lm_eval", "kvbench.lm_eval") from None

Result = TypeVar("Result")
"""The answer to a prompt: a text's tokens, or the likelihoods of its continuations."""
OPTIONS = frozenset(inspect.signature(HFLM.__init__).parameters) - {"self", "kwargs"}
"""Arguments of lm-eval's hf model; all others are knobs of the method."""
PLACE = ("revision", "subfolder", "gguf_file")
"""Those that say where in a repository the model's configuration is."""


@register_model("kvbench")
class KvbenchLM(HFLM):  # type: ignore[misc]
    """lm-eval's ``hf`` model with the prompt's cache compressed by ``method``.

    pretrained: a model of kvbench by name (``tiny``, one that ``model fetch`` converted), or whatever ``hf`` takes.
    preset: a paper of conf/preset; ``options`` are those of ``hf``, and the method's knobs (``kv_ratio=0.25``).
    separator: the text that begins the question. The prompt is compressed up to the last separator, and the question is
    read exactly behind it, so that the method cannot see it. Without a separator the whole prompt is compressed.
    shared_prefix: the number of tokens of the pieces in which prompts are read. Pieces with which the previous prompt
    began, too, such as few-shot examples, are not read again. None: prompts are read whole.
    """

    def __init__(
        self,
        pretrained: Any,
        method: api.Entry = "full",
        preset: str | None = None,
        separator: str = "",
        shared_prefix: int | None = None,
        **options: Any,
    ) -> None:
        hf_options = {name: value for name, value in options.items() if name in OPTIONS}
        knobs = {name: value for name, value in options.items() if name not in OPTIONS}
        # the command line gives texts
        if hf_options.setdefault("batch_size", 1) not in (1, "1"):
            raise UsageError(
                f"batch_size={hf_options['batch_size']} is not possible: a kvbench cache is one prompt's, give 1"
            )
        if pretrained in entries("model") or pretrained in own_packages():
            # lm-eval's device is cuda:0 unless it is given, and its hf model takes the CPU where there is none
            device = hf_options.get("device", "auto") if torch.cuda.is_available() else "cpu"
            pretrained, hf_options["tokenizer"] = load_model(pretrained, device, hf_options.get("dtype", "auto"))
        if hf_options.setdefault("trust_remote_code", False) not in (False, None):
            raise UsageError("trust_remote_code is not possible: kvbench runs no code of a checkpoint, leave it out")
        if isinstance(pretrained, str):
            place = {name: hf_options[name] for name in PLACE if hf_options.get(name)}
            # hf would take a class for a part of the model from the checkpoint: a model without all classes is refused
            traits.of_config(checkpoint.read_config(pretrained, pretrained, **place))
        with checkpoint.refusing_code(str(pretrained)):
            super().__init__(pretrained=pretrained, **hf_options)
        # an empty cache knows the chain that the method and its knobs make on this model
        with api.cache(self.model, method, preset, **knobs) as cache:
            self.chain = cache.chain
        self.separator = separator
        self.prefix: SharedPrefix | None = None
        if shared_prefix is not None:
            self.prefix = SharedPrefix(self.model, shared_prefix)
        # the task whose requests are being answered
        self.task = ""
        # the audited tokens and bytes of each prompt, by task
        self.measured: dict[str, list[MeasuredBytes]] = {}
        # the number of prompts there are to read, by task
        self.prompts: Counter[str] = Counter()
        # whether cache and answer were the full cache's, of each prompt by task
        self.unchanged: dict[str, list[bool]] = {}
        # the marks of thoughts in the answer to the current prompt, and how many answers end inside one, by task
        self.thought = THOUGHT
        self.cut_thoughts: Counter[str] = Counter()

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the generated answer to each request, in the form of lm-eval's model ``hf``."""
        return self._run_by_task(super().generate_until, requests, disable_tqdm)

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        """Return the text of an answer's tokens without its thought, or the text of other tokens with special ones."""
        # with think_end_token= the thought is lm-eval's own matter
        if not skip_special_tokens or self.think_end_token is not None:
            return str(super().tok_decode(tokens, skip_special_tokens))
        text = super().tok_decode(tokens, skip_special_tokens=not self.thought.special)
        answer = self.thought.find_answer(text)
        self.cut_thoughts[self.task] += answer is None
        return answer or ""

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log-likelihood, True if it is the greedy answer) of each request's continuation.

        The form is that of lm-eval's model ``hf``.
        """
        return self._run_by_task(super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Raise UsageError: a text that is scored as a whole has no prompt to compress."""
        raise UsageError(
            f"task {requests[0].task_name}: the likelihood of a whole text (loglikelihood_rolling) has no prompt to be "
            "compressed, and would not be the method's; kvbench run dataset=wikitext2 measures the likelihood of a "
            "text that follows a prompt"
        )

    def get_model_info(self) -> dict[str, Any]:
        """Return the model's part of lm-eval's report, with the method and the mean bytes of each task's prompts."""
        tasks: dict[str, dict[str, float]] = {}
        for name, caches in self.measured.items():
            means = {}
            for key in ("payload", "overhead", "full_bytes", "kept"):
                means[key] = fmean(getattr(cache, key) for cache in caches)
            tasks[name] = {"prompts": len(caches)}
            tasks[name] |= means
            share = format_percent(100 * (means["payload"] + means["overhead"]) / means["full_bytes"])
            say(f"{name}: {self.chain.name} holds {share} of the bytes of the full cache, {len(caches)} prompts")
            if self.cut_thoughts[name]:
                tasks[name]["cut_thoughts"] = self.cut_thoughts[name] / len(caches)
                share = format_percent(100 * tasks[name]["cut_thoughts"])
                say(f"{name}: {share} of the answers end inside their thought, and are empty")
            # the scores are those of the full cache under another name
            if sum(self.unchanged[name]) >= UNCHANGED * len(caches):
                tasks[name]["nothing_compressed"] = True
                say(f"{name}: nothing was compressed, so that the scores say nothing about {self.chain.name}")
        info: dict[str, Any] = super().get_model_info()
        return info | {"kvbench": {"chain": self.chain.identity(), "tasks": tasks}}

    def _run_by_task(self, run: Callable[..., list[Any]], requests: Sequence[Any], disable_tqdm: bool) -> list[Any]:
        """Return the results of ``run`` for all requests in order. It runs task by task, so that bytes are told apart.

        run: the method of lm-eval's ``hf`` that answers a list of requests.
        """
        places_by_task: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            places_by_task.setdefault(request.task_name, []).append(i)
        results: dict[int, Any] = {}
        for task, places in places_by_task.items():
            # lm-eval's own methods run in between and do not pass the task on
            self.task = task
            self.prompts[task] += len(places)
            task_requests = [requests[i] for i in places]
            task_results = run(task_requests, disable_tqdm=disable_tqdm)
            results.update(zip(places, task_results, strict=True))
        return [results[i] for i in range(len(requests))]

    def _model_generate(self, context: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the ids of one prompt [1, n] and of its answer, generated from a compressed cache.

        Other arguments are those of lm-eval's model ``hf``, which calls this.
        """
        generate = super()._model_generate
        template = str(getattr(self.tokenizer, "chat_template", None) or "")
        self.thought = read_thought(self.tokenizer, template, self.tokenizer.decode(context[0]))

        def answer(cache: TransformersCache) -> torch.Tensor:
            """Return the ids of the prompt and of its answer from this cache."""
            return generate(context, *args, **named_cache(cache), **kwargs)

        return self._answer_prompt(context[0], answer, same=torch.equal)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether it is the greedy answer) of each request.

        requests: ((context, continuation), context ids, continuation ids) each. A context is compressed once, and all
        its continuations are forced on its cache.
        """
        places_by_context: dict[tuple[int, ...], list[int]] = {}
        for i, ((context, continuation), context_ids, continuation_ids) in enumerate(requests):
            # the last token of the continuation is predicted but not read
            tokens_to_read = len(context_ids) + len(continuation_ids) - 1
            # cut a context that is too long at its start, as hf does
            start = max(0, tokens_to_read - self.max_length)
            if not context or start >= len(context_ids):
                raise UsageError(
                    f"task {self.task}: no context stands before {continuation[:40]!r}, so that there is nothing "
                    "to compress and its likelihood would not be the method's"
                )
            places_by_context.setdefault(tuple(context_ids[start:]), []).append(i)
        results: dict[int, tuple[float, bool]] = {}
        for context_ids, places in places_by_context.items():
            continuations = [continuation_ids for _, _, continuation_ids in (requests[i] for i in places)]
            answer = partial(self._score_continuations, context_ids, continuations)
            likelihoods = self._answer_prompt(torch.tensor(context_ids), answer, same=operator.eq)
            for i, result in zip(places, likelihoods, strict=True):
                results[i] = result
                # lm-eval's --use_cache stores it under the texts
                texts, _, _ = requests[i]
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return [results[i] for i in range(len(requests))]

    def _score_continuations(
        self, ids: Sequence[int], continuations: Sequence[Sequence[int]], cache: TransformersCache
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether it is the greedy answer) of each continuation of a context.

        ids, continuations: token ids.
        cache: an empty cache, into which the context is read.
        """
        cache.read(ids)
        assert cache.state is not None, "reading a prompt makes the state"
        results = []
        for continuation in continuations:
            forced = torch.tensor(continuation, device=self.device)
            logits = compute_forced_logits(self.model, cache.state, forced)
            # log-probabilities [t, vocabulary], one row for each token of the continuation
            logp = logits.log_softmax(dim=-1, dtype=self.softmax_dtype)
            greedy = bool((logp.argmax(dim=-1) == forced).all())
            # log p(y) = sum over t of log p(y_t | context, y_1 ... y_{t-1})
            likelihood = float(logp.gather(1, forced[:, None]).sum())
            results.append((likelihood, greedy))
        return results

    def _answer_prompt(
        self, ids: torch.Tensor, answer: Callable[[TransformersCache], Result], same: Callable[[Result, Result], bool]
    ) -> Result:
        """Return the ``answer`` to a prompt [n] from its compressed cache, and note whether it is the full cache's.

        answer: the function from a cache of the prompt to the answer.
        same: whether two answers are equal.

        The full cache answers, too, if the compressed cache holds all tokens and bytes. It does not once enough prompts
        have shown that the method compresses something on this task.
        """
        # sampled answers of both caches must draw the same numbers
        states_before = _get_random_states()
        with self._open_cache(ids, self.chain) as cache:
            result = answer(cache)
            # ``answer`` has read the prompt, and reading it measures the cache
            assert cache.measured is not None
            self.measured.setdefault(self.task, []).append(cache.measured)
            unchanged = only_compresses(self.chain) and _holds_everything(cache, cache.measured)
        verdicts = self.unchanged.setdefault(self.task, [])
        # a task counts as unchanged if at least the share UNCHANGED of its prompts does
        most_changed = (1 - UNCHANGED) * self.prompts[self.task]
        # with more changed prompts the verdict on the task is settled, and a second answer would be for nothing
        if unchanged and verdicts.count(False) <= most_changed:
            # draw the same numbers for the second answer, and then go on as if it had not been given
            states_after = _get_random_states()
            _set_random_states(states_before)
            with self._open_cache(ids, Chain()) as cache:
                unchanged = same(result, answer(cache))
            _set_random_states(states_after)
        verdicts.append(unchanged)
        return result

    @contextmanager
    def _open_cache(self, ids: torch.Tensor, chain: Chain) -> Iterator[TransformersCache]:
        """Yield a cache for a prompt [n], which is closed on exit.

        If there is a separator, the tokens before the question are read into the cache first.
        """
        with TransformersCache(self.model, chain, self.prefix) as cache:
            if self.separator:
                cache.read(ids[: self._count_before_question(ids)])
            yield cache

    def _count_before_question(self, ids: torch.Tensor) -> int:
        """Return how many tokens of a prompt [n] end before the separator's last occurrence.

        Raises UsageError if there is no such token.
        """

        def count_characters(n: int) -> int:
            """Return the length of the text of the first n tokens."""
            return len(self.tokenizer.decode(ids[:n], clean_up_tokenization_spaces=False))

        text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        # -1 if the text has no separator: then no number of tokens ends before it
        question_start = text.rfind(self.separator)
        # the largest n with count_characters(n) <= question_start; it is found by halving, since more tokens decode to
        # no fewer characters
        count = bisect_right(range(len(ids) + 1), question_start, key=count_characters) - 1
        if count < 1:
            raise UsageError(
                f"separator={self.separator!r} marks no question after a context in a prompt of task {self.task}: "
                "nothing would be compressed"
            )
        return count


def _holds_everything(cache: TransformersCache, measured: MeasuredBytes) -> bool:
    """Return True if a cache holds all tokens to the end of the answer, and no byte less than the full cache."""
    for layer in cache.kept_positions():
        for positions in layer:
            if len(positions) < len(cache.ids):
                return False
    full_size = float(measured.full16)
    # the full cache's bytes are those of key-value heads: copies for each query head are more
    if cache.chain.per == "query_head":
        full_size *= measured.payload_query_head / measured.payload_kv_head
    return measured.payload16 >= full_size


def _get_random_states() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the states of torch's generators of random numbers, on the CPU and on all GPUs."""
    # asking CUDA for its states would start it
    gpu_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), gpu_states


def _set_random_states(states: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """Set the states of torch's generators, so that the same numbers are drawn again.

    states: the states of the CPU's generator and of all GPUs' generators, from ``_get_random_states``.
    """
    cpu_state, gpu_states = states
    torch.set_rng_state(cpu_state)
    if gpu_states:
        torch.cuda.set_rng_state_all(gpu_states)


def main() -> int:
    """Run lm-eval's command line. Return the exit status. An error of kvbench is one line on stderr."""
    try:
        cli_evaluate()
    except KvbenchError as error:
        say(str(error))
        return error.status
    return 0


if __name__ == "__main__":
    sys.exit(main())

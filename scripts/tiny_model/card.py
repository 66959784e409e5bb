"""Export of the trained tiny model, its accuracy, and the card that reports both."""

from __future__ import annotations

import json
import random
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from kvbench.base.example import Example
from kvbench.engine.calibration import tiny_corpus
from kvbench.models import checkpoint
from kvbench.report import writers
from kvbench.report.table import Table
from kvbench.tasks import tiny
from tiny_model import initial, tokenizer
from tiny_model.train import Progress, Recipe

LENGTHS = (256, 512, 1024, 2048)
NOISY = "needle in noise"
"""A needle in byte-spelled noise instead of filler: the nearest to real text that training has seen."""
BATCH_TOKENS = 8192
COMMAND = "python scripts/train_tiny.py --card-only"

Accuracies = Mapping[str, Mapping[int, float]]


def export(model: LlamaForCausalLM, recipe: Recipe, progress: Progress, threads: int, folder: Path) -> None:
    """Write weights (float16 on disk, loaded as float32), tokenizer and the record of the training to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    half = LlamaForCausalLM(initial.configuration(recipe.shape)).half()
    half.load_state_dict(model.state_dict())
    half.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    # without this, transformers would also compute in float16, and that is slow and inexact on a CPU
    settings["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    tokenizer.build().save_pretrained(folder)
    record = {"recipe": asdict(recipe), "threads": threads, "torch": torch.__version__}
    record |= {"seconds": round(progress.seconds), "steps": progress.steps, "tokens": progress.tokens}
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def load(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Return (model in float32, tokenizer), loaded as by any user of transformers."""
    model = checkpoint.read(LlamaForCausalLM, "tiny", folder, dtype=torch.float32)
    return model.eval(), checkpoint.read(AutoTokenizer, "tiny", folder)


def exact_match(model: LlamaForCausalLM, reader: PreTrainedTokenizerBase, examples: Sequence[Example]) -> float:
    """Return the share of the examples, all of one prompt length, whose greedy answer equals the reference."""
    right = 0
    ids = torch.tensor([reader(example.prompt)["input_ids"] for example in examples])
    size = max(1, BATCH_TOKENS // ids.shape[1])
    for start in range(0, len(examples), size):
        rows = ids[start : start + size]
        output = model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            max_new_tokens=examples[0].max_new_tokens,
            do_sample=False,
        )
        for row, example in zip(output[:, rows.shape[1] :], examples[start : start + size], strict=True):
            right += str(reader.decode(row, skip_special_tokens=True)).strip() in example.answers
    return right / len(examples)


def accuracies(
    model: LlamaForCausalLM, reader: PreTrainedTokenizerBase, lengths: Sequence[int], limit: int, noisy: bool = True
) -> Accuracies:
    """Return {task: {length: exact match}} over ``limit`` examples each; ``noisy`` adds the needle in noise."""
    table = {
        task: {n: exact_match(model, reader, [tiny.make_example(task, n, i) for i in range(limit)]) for n in lengths}
        for task in tiny.TASKS
    }
    if noisy:
        table[NOISY] = {n: exact_match(model, reader, [noisy_needle(n, i) for i in range(limit)]) for n in lengths}
    return table


def noisy_needle(length: int, index: int) -> Example:
    """Return an example of ``length`` tokens, a needle in byte-spelled noise; its depth varies with the index."""
    rng = random.Random(f"eval/noise/{length}/{index}")
    fact, question, answer = tiny.draw_needle(index)
    task = tiny.TASKS["needle"]
    room = length - 1 - tiny.count_tokens(f"{fact} {question}")
    sentences: list[str] = []
    while (size := len(tiny_corpus.encode(sentence := tiny_corpus.draw_noise(rng)))) < room - 1:
        sentences.append(sentence)
        room -= size
    sentences += [f" {filler}" for filler in tiny.draw_filler_sentences(rng, room)]
    sentences.insert(round((0.5 + index * tiny.GOLDEN) % 1.0 * len(sentences)), f" {fact}")
    return Example(f"noise-{length}-{index:05d}", "".join(sentences) + f" {question}", (answer,), task.max_new_tokens)


def write(folder: Path, lengths: Sequence[int], limit: int) -> str:
    """Measure the model in ``folder`` and its untrained beginning. Write README.md there and return its text."""
    record = json.loads((folder / "training.json").read_text())
    shape = initial.Shape(**record["recipe"]["shape"])
    model, reader = load(folder)
    untrained = initial.build(shape, record["recipe"]["seed"]).eval()
    text = _render(
        record,
        shape,
        sum(p.numel() for p in model.parameters()),
        accuracies(model, reader, lengths, limit),
        accuracies(untrained, reader, lengths[:1], limit, noisy=False),
        limit,
    )
    (folder / "README.md").write_text(text)
    return text


def _render(
    record: Mapping[str, Any],
    shape: initial.Shape,
    parameters: int,
    trained: Accuracies,
    untrained: Accuracies,
    limit: int,
) -> str:
    recipe = Recipe(**record["recipe"] | {"shape": shape})
    text = CARD.format(
        shape=shape,
        recipe=recipe,
        parameters=parameters / 1e6,
        minutes=record["seconds"] / 60,
        tokens=record["tokens"] / 1e6,
        steps=record["steps"],
        threads=record["threads"],
        torch=record["torch"],
        limit=limit,
        command=COMMAND,
        trained=_markdown(trained),
        untrained=_markdown(untrained),
    )
    # Filled-in values change the length of lines; headings, tables and commands stay as they are.
    blocks = (block if block.startswith(("#", "|", "```")) else _wrap(block) for block in text.strip().split("\n\n"))
    return "\n\n".join(blocks) + "\n"


def _wrap(paragraph: str) -> str:
    return textwrap.fill(" ".join(paragraph.split()), 120, break_on_hyphens=False, break_long_words=False)


def _markdown(accuracies: Accuracies) -> str:
    lengths = list(next(iter(accuracies.values())))
    heads = ["exact match, %"]
    heads += [str(length) for length in lengths]
    rows = []
    for task, accuracy_by_length in accuracies.items():
        cells = [task]
        cells += [f"{100 * accuracy_by_length[length]:.0f}" for length in lengths]
        rows.append(tuple(cells))
    return writers.markdown(Table(tuple(heads), tuple(rows))).rstrip()


CARD = """# The tiny model

A stock `LlamaForCausalLM` of {parameters:.2f} M parameters that answers questions about synthetic texts of up to 2,048
tokens. It is small enough to run anywhere and good enough at looking things up that a cache which drops the wrong
tokens or channels is seen in its answers.

## Accuracy

Full cache, greedy decoding, float32, {limit} examples each; the whole answer must be equal. This command
measures again and rewrites this file:

```
{command}
```

{trained}

"needle in noise" hides the needle in pseudo-words that the tokenizer spells in bytes, as it spells most real text.

## Model

{shape.layers} layers, width {shape.hidden}, MLP {shape.mlp}, {shape.heads} query and {shape.kv_heads} KV heads of
dimension 32, tied embeddings, RoPE theta 1e6, positions up to 4,096. The tokenizer has one token per word of the tasks
and one per byte of everything else: no text is unknown to it and decoding is lossless. Weights are stored in float16
and loaded in float32; the accuracies above are those of the rounded weights.

## Data

Generated while training by `scripts/tiny_model/corpus.py`, never stored: facts of the tasks of
`kvbench/tasks/tiny.py` among filler sentences, then as many queries as fit. In 15 % of the sequences all filler is
byte-spelled noise, in another 15 % a fifth of it. Training and evaluation draw from random streams whose seeds differ
by construction (`train/...`, `eval/...`). Two auxiliary tasks (copy a random span; random key-value pairs) fade over
the first fifth of the time.

## Recipe

```
python scripts/train_tiny.py --minutes {recipe.minutes:.0f} --threads {threads} --seed {recipe.seed}
```

With torch {torch} on CPU, {minutes:.0f} minutes were {steps} steps or {tokens:.1f} M tokens. Time drives every
schedule: another machine makes a similar model, not the same one.

AdamW (learning rate {recipe.learning_rate:g}, betas 0.9 and 0.98, weight decay {recipe.weight_decay:g} on matrices),
{recipe.tokens_per_step} tokens per step, bfloat16 autocast, gradient norm clipped to 1, {recipe.warmup_steps} warm-up
steps, linear decay over the last quarter. Loss weights: 2 on tokens that only the right fact tells, 1 on other answer
tokens, 0.3 on a random 8 % of the context. Lengths rise from 64 to 2,048, each step when 90 % of the looked-up tokens
are right; from 256 on, half of the sequences have random gaps in their positions.

**The initialisation is structured** (`scripts/tiny_model/initial.py`): layer 0 starts with heads that look back
one to four tokens, later layers with heads that match what precedes. Everything stays trainable, and nothing is
answered before training; exact match of the untrained model:

{untrained}

## Limits

It was not trained on natural text, has no chat template and knows nothing: real data runs through it mechanically, and
scores there say little about a method; only a needle hidden in real text keeps a meaning, because needles in noise were
trained. Its texts are far more regular than natural ones, so it can show that a method loses information and compare
methods on these tasks; it does not predict the scores of another model.
"""

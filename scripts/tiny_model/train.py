"""Training of the tiny model from scratch on one or two CPU cores.

The recipe: AdamW, 4,096 tokens per step in bfloat16 autocast, lengths 64 to 2048 with a step up whenever 90 % of the
looked-up tokens are right, and a linear decay of the learning rate over the last quarter. Time is the budget: the share
of ``minutes`` that has passed drives every schedule. A run that is interrupted goes on from its checkpoint.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from kvbench.engine.calibration.tiny_corpus import TASKS, Role
from tiny_model import corpus, initial
from tiny_model.corpus import NAMES, Batch

LENGTHS = (64, 128, 256, 512, 1024, 2048)
LATEST = (0.0, 0.12, 0.25, 0.4, 0.55, 0.75)
"""Progress at which training moves to each length even if its accuracy is not reached."""
ADVANCE_AT = 0.9
"""Accuracy of looked-up tokens at which training moves to the next length."""
GAPS_FROM = 2
"""Index into LENGTHS from which positions get random gaps."""
AUXILIARY_UNTIL = 0.2
"""Progress at which the copy tasks have faded to their small constant share."""
TASK_WEIGHTS = {"needle": 1.3, "hop": 1.2, "listing": 0.7, "labels": 1.0, "code": 1.0}
ROLE_WEIGHTS = {Role.CONTEXT: 0.3, Role.NOISE: 0.0, Role.ANSWER: 1.0, Role.LOOKUP: 2.0, Role.COPY: 0.5}
CONTEXT_SHARE = 0.08
"""Part of the context tokens whose loss counts."""


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run. A checkpoint can only be continued under the same recipe."""

    shape: initial.Shape = field(default_factory=initial.Shape)
    minutes: float = 50.0
    seed: int = 0
    learning_rate: float = 1e-3
    weight_decay: float = 0.02
    tokens_per_step: int = 4096
    warmup_steps: int = 100
    decay_share: float = 0.25


@dataclass(frozen=True)
class Progress:
    """The progress of a training run: its totals, its place in the curriculum, and its running accuracies.

    stage: the index into LENGTHS of the longest sequences so far.
    difficulty: the difficulty of the copy tasks, from 0 to 2.
    accuracy: the running accuracy of looked-up tokens by task name.
    """

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    stage: int = 0
    steps_at_stage: int = 0
    stage_accuracy: float = 0.0
    difficulty: int = 0
    accuracy: dict[str, float] = field(default_factory=dict)


def train(
    recipe: Recipe, checkpoint: Path, log: Callable[[str], None], max_steps: float = math.inf
) -> tuple[LlamaForCausalLM, Progress]:
    """Train until ``recipe.minutes`` or ``max_steps`` in all are spent. Return (model, progress).

    Training continues from ``checkpoint`` if the file exists.
    """
    model = initial.build(recipe.shape, recipe.seed)
    optimizer = _optimizer(model, recipe)
    rng, progress = random.Random(f"train/{recipe.seed}"), Progress()
    if checkpoint.exists():
        progress = _resume(checkpoint, recipe, model, optimizer, rng)
        log(f"continuing at step {progress.steps}, {progress.seconds / 60:.1f} min")
    log(f"{sum(p.numel() for p in model.parameters())} parameters, {asdict(recipe)}")
    model.train()
    last_step = last_save = time.monotonic()
    logged = progress
    while (share := progress.seconds / (60 * recipe.minutes)) < 1 and progress.steps < max_steps:
        rate = recipe.learning_rate * _rate(recipe, progress.steps, share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        stage = progress.stage
        if stage and rng.random() < 0.4:
            stage = rng.randrange(max(0, stage - 3), stage)
        length = LENGTHS[stage]
        data = corpus.batch(
            rng, length, recipe.tokens_per_step // length, _mix(share), progress.difficulty, progress.stage >= GAPS_FROM
        )
        loss, right = _step(model, optimizer, data)
        now = time.monotonic()
        progress = _advance(progress, stage, share, data, right, now - last_step)
        last_step = now
        if progress.steps % 50 == 0:
            log(_line(progress, logged, loss))
            logged = progress
        if now - last_save > 60:
            save_checkpoint(checkpoint, recipe, progress, model, optimizer, rng)
            last_save = now
    save_checkpoint(checkpoint, recipe, progress, model, optimizer, rng)
    return model.eval(), progress


def save_checkpoint(
    checkpoint: Path,
    recipe: Recipe,
    progress: Progress,
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    rng: random.Random,
) -> None:
    """Write everything that a later process needs to continue the run, in one step."""
    state = {
        "recipe": asdict(recipe),
        "progress": asdict(progress),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": rng.getstate(),
        "torch_rng": torch.get_rng_state(),
    }
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    partial = checkpoint.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, checkpoint)


def _resume(
    checkpoint: Path, recipe: Recipe, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, rng: random.Random
) -> Progress:
    state: dict[str, Any] = torch.load(checkpoint)
    if state["recipe"] != asdict(recipe):
        raise ValueError(f"{checkpoint} was made with {state['recipe']}, not with {recipe}; choose another file")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    rng.setstate(state["rng"])
    torch.set_rng_state(state["torch_rng"])
    return Progress(**state["progress"])


def _optimizer(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.Optimizer:
    embedding = model.model.embed_tokens.weight
    decayed = [p for p in model.parameters() if p.dim() == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.dim() != 2 or p is embedding]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True)


def _rate(recipe: Recipe, steps: int, share: float) -> float:
    warm = min(1.0, (steps + 1) / recipe.warmup_steps)
    return warm * min(1.0, max(0.02, (1 - share) / recipe.decay_share))


def _mix(share: float) -> dict[str, float]:
    auxiliary = max(0.0, 1 - share / AUXILIARY_UNTIL)
    return {**TASK_WEIGHTS, "copy": 0.25 + 2 * auxiliary, "pairs": 0.4 + 3 * auxiliary}


def _step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, data: Batch) -> tuple[float, Tensor]:
    """Update the model once. Return (loss, result of each token [B * T]): 1 right, 0 wrong, -1 not looked at."""
    counted = (data.roles >= Role.ANSWER) | (
        (data.roles == Role.CONTEXT) & (torch.rand(data.roles.shape) < CONTEXT_SHARE)
    )
    chosen = counted.nonzero().flatten()
    targets = data.targets[chosen]
    with torch.autocast("cpu", torch.bfloat16):
        # a mask of ones keeps transformers from reading position gaps as borders of packed sequences
        states = model.model(
            input_ids=data.ids, position_ids=data.positions, attention_mask=torch.ones_like(data.ids), use_cache=False
        ).last_hidden_state
        logits = model.lm_head(states.flatten(0, 1)[chosen]).float()
    weights = torch.tensor([ROLE_WEIGHTS[role] for role in Role])[data.roles[chosen]]
    loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    right = torch.full(data.roles.shape, -1.0)
    right[chosen] = (logits.argmax(-1) == targets).float()
    return loss.item(), right


def _advance(progress: Progress, stage: int, share: float, data: Batch, right: Tensor, seconds: float) -> Progress:
    """Return the progress after one step, moved on to the next length or difficulty if that is due."""
    accuracy = dict(progress.accuracy)
    looked_up = (data.roles == Role.LOOKUP) | (data.roles == Role.COPY)
    for index, name in enumerate(NAMES):
        hits = right[looked_up & (data.tasks == index)]
        if len(hits):
            accuracy[name] = _average(accuracy.get(name), hits.mean().item())
    stage_accuracy, steps_at_stage = progress.stage_accuracy, progress.steps_at_stage
    hits = right[(data.roles == Role.LOOKUP) & (data.tasks < len(TASKS))]
    if stage == progress.stage and len(hits):
        stage_accuracy = _average(stage_accuracy, hits.mean().item())
        steps_at_stage += 1
    difficulty, new_stage = progress.difficulty, progress.stage
    if difficulty < 2 and accuracy.get("copy", 0) > 0.85 and accuracy.get("pairs", 0) > 0.75 and progress.steps > 100:
        difficulty += 1
        accuracy |= {"copy": 0.0, "pairs": 0.0}
    longest = new_stage + 1 == len(LENGTHS)
    if not longest and steps_at_stage > 40 and (stage_accuracy > ADVANCE_AT or share > LATEST[new_stage + 1]):
        new_stage, stage_accuracy, steps_at_stage = new_stage + 1, 0.0, 0
    return replace(
        progress,
        seconds=progress.seconds + seconds,
        steps=progress.steps + 1,
        tokens=progress.tokens + data.ids.numel(),
        stage=new_stage,
        steps_at_stage=steps_at_stage,
        stage_accuracy=stage_accuracy,
        difficulty=difficulty,
        accuracy=accuracy,
    )


def _average(old: float | None, new: float) -> float:
    return new if old is None else 0.97 * old + 0.03 * new


def _line(progress: Progress, logged: Progress, loss: float) -> str:
    speed = (progress.tokens - logged.tokens) / max(1e-9, progress.seconds - logged.seconds)
    accuracies = " ".join(f"{name} {progress.accuracy.get(name, 0):.2f}" for name in NAMES)
    return (
        f"{progress.seconds:.0f} s, step {progress.steps}, length {LENGTHS[progress.stage]}, loss {loss:.3f}, "
        f"lookups {progress.stage_accuracy:.3f} | {accuracies} | difficulty {progress.difficulty}, "
        f"{speed:.0f} tokens/s, {progress.tokens / 1e6:.2f} M tokens"
    )

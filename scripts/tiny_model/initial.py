"""The tiny model's configuration and its structured initialisation.

From an ordinary initialisation, key lookup did not emerge in the time of one CPU core; from this one it does. It only
places features where gradient descent can use them, in the spirit of mimetic initialisation (Trockman and Kolter,
arXiv:2305.09828): every weight stays trainable and the untrained model answers nothing correctly.

- Dimension 0 of every embedding is one constant, the other n = hidden - 1 dimensions are the token's random identity.
- Layer 0: head h looks back 1 + h % 4 tokens. On the fast RoPE pairs the key sees the constant, the query sees it
  turned by the phase of that distance. It writes the token it sees, rotated by a random orthogonal R of its distance.
- Later layers: on the slow RoPE pairs, keys read the identity of distance j + 1 and queries that of distance j, so that
  a query meets the token *after* an earlier occurrence of its own context. Output is proportional to the transposed
  value projection: the identity that was read is what is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.engine.calibration.tiny_corpus import BOS, EOS
from tiny_model.tokenizer import PAD, vocabulary

THETA = 1e6
CONSTANT = 0.4
"""Value of the constant embedding dimension."""
IDENTITY_STD = 0.08
"""About hidden ** -0.5, so that the tied head gives logits of order one."""
COPY_BACK, COPY_MATCH = 0.8, 0.6
"""Output strength of layer 0 and of the later layers, relative to the embedding."""
MATCH = 4.0
"""Sharpness of the match between queries and keys in the later layers."""
NOISE = 0.01
LOOK_BACK = ((0, 8.0), (1, 8.0), (2, 4.0), (3, 4.0))
"""(RoPE pair, attention logit) that together single out one distance."""
DISTANCES = 4
SLOW = 0.008
"""Radians per token below which a RoPE pair hardly turns over the lengths of training."""


@dataclass(frozen=True)
class Shape:
    """The sizes of the model."""

    layers: int = 6
    hidden: int = 128
    mlp: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32


def build(shape: Shape, seed: int) -> LlamaForCausalLM:
    """Return a stock Llama with the structured initialisation. The seed decides it."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(configuration(shape))
    with torch.no_grad():
        _initialise(model, shape, torch.Generator().manual_seed(seed))
    return model


def configuration(shape: Shape) -> LlamaConfig:
    """Return the stock configuration with tied embeddings and RoPE theta 1e6."""
    return LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def _initialise(model: LlamaForCausalLM, shape: Shape, rng: torch.Generator) -> None:
    hidden, dim, group = shape.hidden, shape.head_dim, shape.heads // shape.kv_heads
    embedding = model.model.embed_tokens.weight
    embedding.normal_(std=IDENTITY_STD, generator=rng)
    embedding[:, 0] = CONSTANT
    rms = embedding.pow(2).mean(-1).sqrt().mean().item()
    rotations = [torch.eye(hidden - 1), *(_orthogonal(hidden - 1, hidden - 1, rng) for _ in range(DISTANCES))]
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        for weight in (mlp.gate_proj.weight, mlp.up_proj.weight):
            weight.normal_(std=hidden**-0.5, generator=rng)
        mlp.down_proj.weight.normal_(std=2 * rms * (2 * shape.layers * shape.mlp) ** -0.5, generator=rng)
        queries = attention.q_proj.weight.view(shape.kv_heads, group, dim, hidden)
        keys = attention.k_proj.weight.view(-1, dim, hidden)
        values = attention.v_proj.weight.view(-1, dim, hidden)
        outputs = attention.o_proj.weight.view(hidden, shape.kv_heads, group, dim)
        for weight in (attention.v_proj.weight, attention.o_proj.weight):
            weight.zero_()
        for kv in range(shape.kv_heads):
            read = _orthogonal(hidden - 1, dim, rng).T
            values[kv, :, 1:] = read
            distances = [1 + (kv * group + g) % DISTANCES for g in range(group)]
            if index == 0:
                _look_back(queries[kv], keys[kv], distances, CONSTANT / rms, rng)
            else:
                shifts = ((0, 1), (1, 2)) if kv % 2 == 0 else ((2, 3), (3, 4))
                _match(queries[kv], keys[kv], shifts, rotations, rng)
            for g, distance in enumerate(distances):
                output = COPY_BACK * rotations[distance] @ read.T if index == 0 else COPY_MATCH * read.T
                outputs[1:, kv, g] = rms * output


def _look_back(queries: Tensor, keys: Tensor, distances: list[int], constant: float, rng: torch.Generator) -> None:
    """Make each head of ``queries`` [G, D, hidden] attend to the key at its distance back."""
    dim = keys.shape[0]
    frequencies = _frequencies(dim)
    for weight in (queries, keys):
        weight.normal_(std=0.05 * keys.shape[1] ** -0.5, generator=rng)
    for pair, logit in LOOK_BACK:
        strength = math.sqrt(logit * math.sqrt(dim)) / constant
        keys[pair, 0] += strength
        for query, distance in zip(queries, distances, strict=True):
            angle = distance * frequencies[pair].item()
            query[pair, 0] += strength * math.cos(angle)
            query[pair + dim // 2, 0] -= strength * math.sin(angle)


def _match(
    queries: Tensor,
    keys: Tensor,
    shifts: tuple[tuple[int, int], ...],
    rotations: list[Tensor],
    rng: torch.Generator,
) -> None:
    """Make queries that read slot j meet keys that read slot k, for each (j, k) of ``shifts``.

    ``queries`` are weights [G, D, hidden], ``keys`` weights [D, hidden].
    """
    dim = keys.shape[0]
    slow = torch.nonzero(_frequencies(dim) < SLOW).flatten()
    rows = torch.cat((slow, slow + dim // 2))
    rows = rows[torch.randperm(len(rows), generator=rng)]
    share = len(rows) // len(shifts)
    for weight in (queries, keys):
        weight.normal_(std=NOISE, generator=rng)
    for number, (query_shift, key_shift) in enumerate(shifts):
        chosen = rows[number * share : (number + 1) * share]
        read = _orthogonal(keys.shape[1] - 1, share, rng).T * math.sqrt(MATCH)
        keys[chosen, 1:] += read @ rotations[key_shift].T
        queries[:, chosen, 1:] += read @ rotations[query_shift].T


def _frequencies(dim: int) -> Tensor:
    """Return the radians per token of each RoPE pair."""
    return THETA ** -(torch.arange(0, dim, 2).float() / dim)


def _orthogonal(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(rows, columns, generator=rng))[0]

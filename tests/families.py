"""Small random models of the tested families, built offline in milliseconds."""

from __future__ import annotations

from functools import cache

import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvbench.engine.decode import generate_rows
from kvbench.kv.model_shape import Shape, from_config
from kvbench.models.traits import ModelTraits

GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
COMMON = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = ("llama", "mistral", "qwen2", "gpt_neox", "opt", "qwen3")
LINEAR = tuple(f for f in FAMILIES if f != "qwen3")
"""Families whose keys are a projection, rotated: low-rank methods refuse the others."""
SMALL_BLOCKS = {method: {"group": 16} for method in ("q8_0", "q4_0", "mxfp4")}
"""Knobs of formats whose usual block is wider than a head of these models."""


@cache
def build(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model; the same weights every time. Weights are scaled up so that attention is far from uniform."""
    torch.manual_seed(FAMILIES.index(family))
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**COMMON, **GQA, intermediate_size=96, head_dim=16))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**COMMON, **GQA, intermediate_size=96, sliding_window=4096))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**COMMON, **GQA, intermediate_size=96))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**COMMON, **GQA, intermediate_size=96, head_dim=16))
    elif family == "gpt_neox":
        config = {**COMMON, "num_attention_heads": 4, "intermediate_size": 96}
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**config))
    else:
        config = {**COMMON, "num_attention_heads": 4, "ffn_dim": 96, "max_position_embeddings": 512}
        model = OPTForCausalLM(OPTConfig(**config, word_embed_proj_dim=64, pad_token_id=0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                p.uniform_(0.5, 1.5)
            if p.dim() == 2:
                p.normal_(std=0.35 if any(k in name for k in ("q_proj", "k_proj", "query_key_value")) else 0.15)
    return model.to(dtype).eval()


def heads_of(model: PreTrainedModel) -> tuple[int, int]:
    """The model's kv heads and their dimension."""
    shape = from_config(model.config)
    return shape.kv_heads, shape.head_dim


def of_layers(n: int) -> ModelTraits:
    """The traits of a Llama with n layers."""
    return ModelTraits("llama", Shape(n, 4, 2, 16), None, None)


def hooks(model: PreTrainedModel) -> int:
    """How many hooks its modules have; transformers leaves some of its own on a model that is asked for more."""
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def generated(model: PreTrainedModel, caches, endings) -> list[list[int]]:
    """The tokens of each cache's answer, decoded as one batch."""
    return [answer.tokens for answer in generate_rows(model, caches, endings)]


def prompt(n: int, seed: int = 0) -> torch.Tensor:
    """n random token ids that avoid the special ones."""
    return torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(seed))

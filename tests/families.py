"""Small random models of the five families, built offline in milliseconds."""

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
)

from kvbench.engine.decode import generate_rows

GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
COMMON = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = ("llama", "mistral", "qwen2", "gpt_neox", "opt")


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
    elif family == "gpt_neox":
        config = {**COMMON, "num_attention_heads": 4, "intermediate_size": 96}
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**config))
    else:
        config = {**COMMON, "num_attention_heads": 4, "ffn_dim": 96, "max_position_embeddings": 512}
        model = OPTForCausalLM(OPTConfig(**config, word_embed_proj_dim=64, pad_token_id=0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.normal_(std=0.35 if any(k in name for k in ("q_proj", "k_proj", "query_key_value")) else 0.15)
    return model.to(dtype).eval()


def heads_of(model: PreTrainedModel) -> tuple[int, int]:
    """The model's kv heads and their dimension."""
    c = model.config
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    return heads, getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads


def hooks(model: PreTrainedModel) -> int:
    """How many hooks its modules have; transformers leaves some of its own on a model that is asked for more."""
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def generated(model: PreTrainedModel, caches, endings) -> list[list[int]]:
    """The tokens of each cache's answer, decoded as one batch."""
    return [answer.tokens for answer in generate_rows(model, caches, endings)]


def prompt(n: int, seed: int = 0) -> torch.Tensor:
    """n random token ids that avoid the special ones."""
    return torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(seed))

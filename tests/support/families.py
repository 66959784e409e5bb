"""Small random models of the tested families, built offline in milliseconds."""

from __future__ import annotations

import inspect
import re
from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.opt.modeling_opt import OPTDecoder

from kvbench.engine.decode import generate_rows
from kvbench.kv.model_shape import Shape, from_config
from kvbench.models.releases import HOLDS_STATES
from kvbench.models.traits import ModelTraits

GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
COMMON = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2}
MLP = {**GQA, "intermediate_size": 96}
LOCAL = {**MLP, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}
S, F = "sliding_attention", "full_attention"
L = "linear_attention"
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
DELTA = {**MLP, **DELTA, "num_hidden_layers": 5, "head_dim": 16, "pad_token_id": 0, "layer_types": [L, F, L, F, F]}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"shared_expert_intermediate_size": 32},
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16}
MAMBA2 = {**MLP, **MAMBA2, "mamba_d_conv": 4, "mamba_expand": 2, "head_dim": 16, "pad_token_id": 0}
CONFIGS = {
    "llama": {**MLP, "head_dim": 16},
    "mistral": {**MLP, "sliding_window": 4096},
    "qwen2": MLP,
    "gpt_neox": {"num_attention_heads": 4, "intermediate_size": 96},
    "opt": {
        **{"num_attention_heads": 4, "ffn_dim": 96, "max_position_embeddings": 512},
        **{"word_embed_proj_dim": 64, "pad_token_id": 0},
    },
    "qwen3": {**MLP, "head_dim": 16},
    "gemma2": {**LOCAL, "num_hidden_layers": 4, "layer_types": [F, S, F, F], "attn_logit_softcapping": 8.0},
    "gemma3_text": {**LOCAL, "num_hidden_layers": 5, "layer_types": [S, F, S, F, F]},
    "phi3": {**MLP, "pad_token_id": 0, "sliding_window": None},
    "qwen3_moe": {**MLP, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "smollm3": {**MLP, "pad_token_id": 0, "no_rope_layers": [1, 0, 1]},
    "mixtral": {**MLP, "sliding_window": None, "num_local_experts": 4},
    "arcee": MLP,
    "cohere2": {**MLP, "num_hidden_layers": 5, "pad_token_id": 0, "sliding_window": 24, "layer_types": [S, F, S, F, F]},
    "ernie4_5": {**MLP, "head_dim": 16},
    "exaone4": {**MLP, "num_hidden_layers": 5, "pad_token_id": 0, "sliding_window": 24, "layer_types": [S, F, S, F, F]},
    "glm4": {**MLP, "head_dim": 16, "pad_token_id": 0},
    "glm4_moe": {
        **{**MLP, "head_dim": 16, "pad_token_id": 0, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    },
    "granite": MLP,
    "minimax_m2": {**MLP, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "ministral3": {**MLP, "head_dim": 16},
    "olmo2": {**MLP, "pad_token_id": 0},
    "olmo3": {**MLP, "num_hidden_layers": 5, "pad_token_id": 0, "sliding_window": 24, "layer_types": [S, F, S, F, F]},
    "seed_oss": {**MLP, "head_dim": 16},
    "gpt_oss": {
        **{**MLP, "num_hidden_layers": 5, "head_dim": 16, "pad_token_id": 0, "sliding_window": 24},
        **{"layer_types": [S, F, S, F, F], "num_local_experts": 4, "num_experts_per_tok": 2},
    },
}
WITH_STATES = {
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "granitemoehybrid": {
        **{**MAMBA2, "num_hidden_layers": 5, "layer_types": [L, F, L, F, F]},
        **{"num_local_experts": 0, "shared_intermediate_size": 96},
    },
    "bamba": {**MAMBA2, "num_hidden_layers": 5, "attn_layer_indices": [1, 3, 4]},
    "jamba": {
        **{**MLP, "num_hidden_layers": 6, "pad_token_id": 0, "attn_layer_period": 2, "attn_layer_offset": 1},
        **{"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 8},
    },
    "nemotron_h": {
        **{**MLP, "head_dim": 16, "pad_token_id": 0, "num_hidden_layers": 6, "mamba_num_heads": 8},
        **{"layers_block_type": ["mamba", "attention", "mlp", "mamba", "attention", "attention"], "mamba_head_dim": 16},
        **{"n_groups": 1, "ssm_state_size": 16, "conv_kernel": 4, "chunk_size": 16},
    },
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 128},
    "lfm2": {
        **{**MLP, "num_hidden_layers": 5, "pad_token_id": 0, "layer_types": ["conv", F, "conv", F, F]},
        **{"block_ff_dim": 96, "block_auto_adjust_ff_dim": False},
    },
    "olmo_hybrid": DELTA,
}
"""Families whose layers hold a state in place of keys, or beside them."""
if HOLDS_STATES:
    CONFIGS |= WITH_STATES
HOLDS_LATENTS = hasattr(DeepseekV3Attention, "expand_kv")
"""True if this release caches latents themselves; earlier ones cache the keys and values made of them."""
SHARES_KEYS = hasattr(Gemma3nTextConfig, "kv_sharing_modes")
"""True if this release shares keys and values between layers in the way that kvbench knows."""
LATENT = {
    **{**MLP, "num_key_value_heads": 4, "pad_token_id": 0, "kv_lora_rank": 24, "q_lora_rank": 20, "head_dim": 8},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
}
LATENT_EXPERTS = {
    **{**LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
WITH_LATENTS = {
    "deepseek_v2": {**LATENT_EXPERTS, "topk_method": "greedy"},
    "deepseek_v3": LATENT_EXPERTS,
    "glm4_moe_lite": LATENT_EXPERTS,
    "kimi_linear": {
        **{**LATENT_EXPERTS, "q_lora_rank": None, "num_hidden_layers": 5, "layer_types": [L, F, L, F, F]},
        **{"linear_num_heads": 4, "linear_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 4},
        **{"num_expert_group": 1},
    },
    "longcat_flash": {
        **{**LATENT, "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32},
        **{"n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 1},
    },
    # its embeddings are twelve times as large as its layers otherwise: what a cache loses would not show
    "minicpm3": {**LATENT, "scale_emb": 1},
}
"""Families that hold one latent a token in place of the keys and values of heads."""
if HOLDS_LATENTS:
    CONFIGS |= WITH_LATENTS
SHARED = {
    **{**MLP, "head_dim": 16, "sliding_window": 24, "num_hidden_layers": 8, "layer_types": [S, F, S, F, F, S, F, F]},
    **{"num_kv_shared_layers": 3, "pad_token_id": 0, "vocab_size_per_layer_input": 128},
    **{"hidden_size_per_layer_input": 8, "tie_word_embeddings": False},
}
WITH_SHARING = {
    "gemma3n_text": {
        **{**SHARED, "laurel_rank": 8, "altup_num_inputs": 2, "altup_active_idx": 0},
        **{"activation_sparsity_pattern": [0.9, 0.9, *[0.0] * 6]},
    },
    "gemma4_text": {**SHARED, "global_head_dim": 32},
}
"""Families whose last layers read the keys and values of an earlier one. Gemma 4's heads differ by kind of layer."""
if SHARES_KEYS:
    CONFIGS |= WITH_SHARING
C = "chunked_attention"
CONFIGS["llama4_text"] = {
    **{**MLP, "head_dim": 16, "pad_token_id": 0, "num_hidden_layers": 5, "layer_types": [C, F, C, F, F]},
    **{"no_rope_layers": [1, 0, 1, 0, 0], "attention_chunk_size": 24, "floor_scale": 16, "intermediate_size_mlp": 96},
    **{"num_local_experts": 2, "moe_layers": [1]},
}
# the indexers choose 512 tokens for each query, and all texts of the tests but those about that are shorter
INDEXED = {**LATENT_EXPERTS, "index_topk": 512, "index_head_dim": 16, "index_n_heads": 2, "num_hidden_layers": 4}
WITH_INDEXERS = {
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": {**INDEXED, "indexer_types": ["full", "shared", "full", "full"]},
}
WITH_LATENTS |= WITH_INDEXERS
if HOLDS_LATENTS:
    CONFIGS |= WITH_INDEXERS
FAMILIES = tuple(CONFIGS)
PLAIN = tuple(f for f in FAMILIES if f not in WITH_LATENTS)
"""Families that hold keys and values, on which every kind of method has a meaning."""
WHOLE = FAMILIES[:6]
"""Families that run every test of families; the others run those of ``tests/methods/test_properties.py`` and a few."""
LOCALS = (
    "gemma2",
    "gemma3_text",
    "cohere2",
    "exaone4",
    "olmo3",
    "gpt_oss",
    "llama4_text",
    *(WITH_SHARING if SHARES_KEYS else ()),
)
"""Families with local layers."""
LINEAR = ("llama", "mistral", "qwen2", "gpt_neox", "opt")
"""Families whose keys are a projection, rotated: low-rank methods refuse most others."""
OPT_WAITS = re.search(r"\battention_mask = torch.ones", inspect.getsource(OPTDecoder.forward)) is not None
"""Whether this release's OPT makes a mask in each step, which is looked at: no graph records that."""
SMALL_BLOCKS = {method: {"group": 16} for method in ("q8_0", "q4_0", "mxfp4")}
"""Knobs of formats whose usual block is wider than a head of these models."""


def random_model(family: str, config) -> PreTrainedModel:
    """A model of a config, with attention that caps logits where it says so: transformers 5.2's sdpa does not."""
    eager = {"attn_implementation": "eager"} if "attn_logit_softcapping" in config else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config), **eager)


QUERIES_AND_KEYS = ("q_proj", "k_proj", "query_key_value", "qkv_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")
"""Parts of the names of the matrices that make logits."""


@cache
def build(family: str, dtype: torch.dtype = torch.float32, **config) -> PreTrainedModel:
    """A random model; the same weights every time. Weights are scaled up so that attention is far from uniform.

    config: what differs from the family's small configuration, such as a test's fewer layers.
    """
    torch.manual_seed(FAMILIES.index(family))
    config = {**COMMON, **CONFIGS[family], **config}
    model = random_model(family, config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                p.uniform_(0.5, 1.5)
                if family == "olmo2":
                    p.mul_(2)  # it norms all heads together, so that a head's logits are small
            if name.endswith("sinks"):
                p.uniform_(0.0, 8.0)
            if p.dim() == 2:
                queries_and_keys = any(k in name for k in QUERIES_AND_KEYS)
                p.normal_(std=0.35 if queries_and_keys else 0.15)
            elif p.dim() == 3:  # all experts of a layer
                p.normal_(std=0.08)
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


def rounds_alike(model: PreTrainedModel, few: int, many: int) -> bool:
    """Tell if this processor rounds the products of ``few`` rows as it does among ``many``: not all do."""
    ids = torch.arange(3, 3 + many)[:, None]
    with torch.no_grad():
        return torch.equal(model(ids[:few]).logits, model(ids).logits[:few])


def prompt(n: int, seed: int = 0) -> torch.Tensor:
    """n random token ids that avoid the special ones."""
    return torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(seed))

"""Latent attention (MLA, arXiv 2405.04434, section 2.1): one vector a token stands for keys and values of all heads.

A layer holds the latent c_t of each token (R numbers, 512 in DeepSeek-V3) and one rotated part of its key, r_t (64).
Head h has the key [W_K,h c_t, r_t] and the value W_V,h c_t. Its query [q, p] meets them as

    q . W_K,h c_t + p . r_t = (W_K,h^T q) . c_t + p . r_t        the logit of token t
    sum_t a_t W_V,h c_t     = W_V,h (sum_t a_t c_t)              the output

so that attention runs over one kv head with the key [c_t, r_t], whose first R numbers are its value. kvbench absorbs
W_K into the query and applies W_V to the output, as engines do while decoding. It never makes the heads' keys and
values.

Shapes: B rows, Hq query heads, T new tokens, R latent, r rotated part of a key, d unrotated part of a head's key,
v a head's value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache as HFCache


class LatentCache(HFCache):
    """transformers' cache for layers that hold latents. It stores [c, r] as keys, and values without channels."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store latents c [B, 1, T, R] and rotated keys [B, 1, T, r], which transformers passes as keys and values.

        Returns all cached keys [B, 1, L, R + r], each a latent with its rotated part behind it, and values without
        channels.
        """
        keys = torch.cat([key_states, value_states], dim=-1)
        return super().update(keys, keys[..., :0], layer_idx, *args, **kwargs)


def expands_after_caching(module: nn.Module) -> bool:
    """Return True if an attention module caches latents, and expands them to keys and values only afterwards."""
    return hasattr(module, "expand_kv")


def find_up_fault(module: nn.Module) -> str | None:
    """Return the reason why a module's up-projections cannot be absorbed into query and output; None if they can."""
    up = getattr(module, "kv_b_proj", None)
    # modules with adapters or quantised weights compute more than one matrix product
    if type(up) is nn.Linear and up.weight.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return None
    dtype = getattr(getattr(up, "weight", None), "dtype", None)
    return f"its kv_b_proj is a {type(up).__name__} of {dtype}, not a plain matrix"


def absorb_query(module: nn.Module, query: Tensor) -> Tensor:
    """Return the query [B, Hq, T, R + r] to multiply with [c, r], from the model's own query [B, Hq, T, d + r]."""
    key_up, _ = _up_projections(module)
    unrotated_width = key_up.shape[1]  # d
    unrotated, rotated = query.split([unrotated_width, query.shape[3] - unrotated_width], dim=3)
    # W_K^T q of each head: [B, Hq, T, d] @ [Hq, d, R]
    return torch.cat([unrotated @ key_up, rotated], dim=3)


def head_outputs(module: nn.Module, out: Tensor) -> Tensor:
    """Return the heads' outputs [B, Hq, T, v], given the weighted sum of [c, r], ``out`` [B, Hq, T, R + r]."""
    _, value_up = _up_projections(module)
    latent_width = value_up.shape[2]  # R: the sum of the rotated parts r behind it belongs to no value
    # W_V of each head: [B, Hq, T, R] @ [Hq, R, v]
    return out[..., :latent_width] @ value_up.transpose(1, 2)


def _up_projections(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Return (W_K [Hq, d, R], W_V [Hq, v, R]) of an attention module, as views of the one matrix that holds both."""
    # the rows of the matrix lie head by head: d rows of keys, then v rows of values
    key_width, value_width = int(module.qk_nope_head_dim), int(module.v_head_dim)  # type: ignore[arg-type]
    weight = module.kv_b_proj.weight  # type: ignore[union-attr]
    by_head = weight.unflatten(0, (-1, key_width + value_width))  # type: ignore[operator]
    return by_head.split([key_width, value_width], dim=1)


@contextmanager
def pass_latents_on(modules: list[nn.Module]) -> Iterator[None]:
    """While the context is open, keep attention modules with latents from expanding a cache layer of kvbench.

    The modules pass the layer on to kvbench's attention in place of keys and values.
    """

    def pass_on(self: Any, latent: Any, rotated_key: Any) -> Any:
        """Return the arguments themselves if they are a cache layer, else the keys and values that they expand to."""
        # without a cache of kvbench, the arguments are the latents themselves, and the module's own method expands them
        if isinstance(latent, Tensor):
            return type(self).expand_kv(self, latent, rotated_key)
        return latent, rotated_key

    patched = [module for module in modules if expands_after_caching(module)]
    for module in patched:
        # the method is bound to the module, so that a copy of the model expands by its own weights
        vars(module)["expand_kv"] = MethodType(pass_on, module)
    try:
        yield
    finally:
        for module in patched:
            del vars(module)["expand_kv"]

"""A slow, obvious reference of low-rank projections: a copy of the model whose weights are the products themselves.

Its keys and values are dense and whole, so that nothing of how latents are cached or read is shared with the package.
"""

from __future__ import annotations

import copy

import torch


def attentions(model):
    return [m for m in model.modules() if type(m).__name__.endswith("Attention") and hasattr(m, "layer_idx")]


def parts(attention, which: int, head_dim: int = 16) -> torch.Tensor:
    """The rows of the key (0) or value (1) projection [Hk D, d], a copy."""
    if hasattr(attention, "query_key_value"):
        w = attention.query_key_value.weight.detach()
        return w.view(-1, 3, head_dim, w.shape[1])[:, 1 + which].reshape(-1, w.shape[1]).clone()
    return (attention.k_proj, attention.v_proj)[which].weight.detach().clone()


def with_weights(model, new):
    """A copy of the model whose key and value projections are ``new[layer][0 or 1]``."""
    actual = copy.deepcopy(model)
    for attention, pair in zip(attentions(actual), new, strict=True):
        for which, w in enumerate(pair):
            w = w.to(actual.dtype)
            with torch.no_grad():
                if hasattr(attention, "query_key_value"):
                    own_value = attention.query_key_value.weight
                    own_value.view(-1, 3, 16, own_value.shape[1])[:, 1 + which] = w.view(-1, 16, w.shape[1])
                else:
                    (attention.k_proj, attention.v_proj)[which].weight.copy_(w)
    return actual


def palu(model, moments, ranks, rows):
    """Every group's weight projected on the leading eigenvectors of W M W^T: the best rank-r outputs over the text."""
    new = []
    for attention, m, pair in zip(attentions(model), moments, ranks, strict=True):
        cut = []
        for which in (0, 1):
            groups = []
            for w, rank in zip(parts(attention, which).split(rows), pair[which], strict=True):
                w = w.double()
                vectors = torch.linalg.eigh(w @ m.double() @ w.T).eigenvectors[:, len(w) - rank :]
                groups.append(vectors @ (vectors.T @ w))
            cut.append(torch.cat(groups))
        new.append(cut)
    return with_weights(model, new)


def asvd(model, sizes, ranks, alpha):
    """W diag(s) cut to rank r and divided by s, column by column."""
    new = []
    for attention, size, pair in zip(attentions(model), sizes, ranks, strict=True):
        cut = []
        for which in (0, 1):
            w, (rank,) = parts(attention, which).double(), pair[which]
            scale = [float(x) ** alpha for x in size]
            u, s, vt = torch.linalg.svd(w * torch.tensor(scale, dtype=torch.float64))
            best = sum(s[i] * torch.outer(u[:, i], vt[i]) for i in range(rank))
            cut.append(torch.stack([column / x for column, x in zip(best.T, scale, strict=True)], dim=1))
        new.append(cut)
    return with_weights(model, new)


def rows_of_attention(model, ids):
    """A[h][i][j] of every layer, by the model's own eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            actual = model(ids[None], output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    return [layer[0].double().tolist() for layer in actual]

"""Readings of small random models, and what their activations are, computed plainly by transformers itself."""

from __future__ import annotations

import torch
from support.families import build, prompt
from transformers.models.llama import modeling_llama

from kvbench.papers.figures.reading import Prompt, Reading


def reading(family="llama", lengths=(40,), sources=("a",), **knobs):
    """A reading of one random prompt per source and length."""
    prompts = [
        Prompt(source, f"{source} {n}", prompt(n, seed=17 * i + n)) for i, source in enumerate(sources) for n in lengths
    ]
    return Reading(build(family), prompts, knobs)


def activations(model, ids):
    """Post-RoPE (q, k, v) [H, n, D] per layer of a Llama, attention [Hq, n, n] and hidden states [n, d].

    Hidden states are those in front of every layer, and behind the last before the final norm.
    """
    layers, rope = model.model.layers, modeling_llama.apply_rotary_pos_emb
    rotated, values, hidden = [], [], []

    def spy(*args, **kwargs):
        q, k = rope(*args, **kwargs)
        rotated.append((q[0], k[0]))
        return q, k

    def before(module, args, kwargs):
        hidden.append((args[0] if args else kwargs["hidden_states"])[0])

    def after(module, args, output):
        hidden.append((output[0] if isinstance(output, tuple) else output)[0])

    hooks = [m.self_attn.v_proj.register_forward_hook(lambda module, args, out: values.append(out[0])) for m in layers]
    hooks += [m.register_forward_pre_hook(before, with_kwargs=True) for m in layers]
    hooks.append(layers[-1].register_forward_hook(after))
    own_value = model.config._attn_implementation
    model.set_attn_implementation("eager")
    modeling_llama.apply_rotary_pos_emb = spy
    try:
        with torch.no_grad():
            out = model(ids[None], output_attentions=True)
    finally:
        modeling_llama.apply_rotary_pos_emb = rope
        model.set_attn_implementation(own_value)
        for hook in hooks:
            hook.remove()
    heads = model.config.num_key_value_heads
    by_head = [v.view(len(ids), heads, -1).transpose(0, 1) for v in values]
    return [(q, k, v) for (q, k), v in zip(rotated, by_head, strict=True)], [a[0] for a in out.attentions], hidden

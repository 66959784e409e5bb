"""Probing a model of an untested family: it reads a few tokens, and kvbench's results are compared with its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError
from kvbench.kv.exact_attention import attend_rows
from kvbench.kv.model_shape import compressed_layers, key_layers, state_layers
from kvbench.models.interface import KvbenchLayer, attached, compressed_modules, evaluating, model_cache
from kvbench.models.rotary import stated_frequencies
from kvbench.models.state_layer import StateLayer, in_model_order, state_layers_of
from kvbench.storage.roles import Rotary

TOKENS = 8
"""The number of tokens that a probe reads."""
SHIFT = 5
"""The tokens are read at two places. Their positions at the second place are larger by this number."""


@dataclass(frozen=True)
class Probe:
    """The result of probing a model.

    unrolled: why cached keys cannot be rotated to other positions; None if they can.
    mixed: why cached keys and values are not linear in their layer's input; None if they are.
    frequencies: for each compressed layer the frequencies [r / 2] that turn its keys and queries, zeros if positions do
        not change them, and None if neither does.
    """

    unrolled: str | None
    mixed: str | None
    frequencies: tuple[Tensor | None, ...]


class ProbeLayer(KvbenchLayer):
    """A cache layer that keeps the queries, keys and values [1, H, T, D] of the tokens that it was given last."""

    def add(self, k: Tensor, v: Tensor) -> None:
        """Keep these keys and values alone."""
        self.k, self.v, self.seen = k, v, k.shape[2]

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Keep the queries, and return their attention over the tokens of the same call."""
        self.query = query
        # a probe reads one row: [1, H, T, D] -> [H, T, D] and back
        return attend_rows(query[0], self.k[0], self.v[0], scale, window)[None]


_PROBED: WeakKeyDictionary[PreTrainedModel, Probe] = WeakKeyDictionary()
"""The result for each model that was probed."""


def probe_model(model: PreTrainedModel) -> Probe:
    """Return the result of probing a model. Each model is probed once.

    Raises UsageError if the logits under kvbench's attention differ from those under the model's own.
    """
    if model not in _PROBED:
        _PROBED[model] = _compare_attention(model)
    return _PROBED[model]


_COUNTED: WeakKeyDictionary[PreTrainedModel, tuple[int, int]] = WeakKeyDictionary()
"""The result of ``count_states`` for each model whose states were counted."""


def count_states(model: PreTrainedModel) -> tuple[int, int]:
    """Return how many numbers the states of all layers have, as (of convolutions, of recurrences).

    The size of a state does not depend on the text, so that one token is read to see it. Models without states have
    (0, 0).
    """
    if not state_layers(model.config):
        return 0, 0
    if model not in _COUNTED:
        conv_numbers, recurrent_numbers = 0, 0
        for layer in _read_one_token(model):
            conv, recurrent = layer.state().counts
            conv_numbers += conv
            recurrent_numbers += recurrent
        _COUNTED[model] = conv_numbers, recurrent_numbers
    return _COUNTED[model]


def _read_one_token(model: PreTrainedModel) -> list[StateLayer]:
    """Return the cache layers with states after the model has read one token."""
    config = model.config
    reader = model
    if model.device.type == "meta":
        # without weights, PyTorch finds the shapes of experts' products in bf16 only; the model keeps its dtype
        reader = copy.deepcopy(model).bfloat16()
    layers = [ProbeLayer() for _ in key_layers(config)]
    states = state_layers_of(config, layers)
    cache = model_cache(config, in_model_order(config, layers, states))
    # any token will do: 0, at position 0
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad(), attached(reader):
        reader(input_ids=token, position_ids=token, use_cache=True, **cache)
    return states


def _compare_attention(model: PreTrainedModel) -> Probe:
    """Return the result of reading the same few tokens under the model's own attention and under kvbench's.

    Under kvbench's attention the tokens are read at two places, which shows whether keys can be rotated. Raises
    UsageError if the logits of the two attentions differ.
    """
    # any tokens will do; small test models may have fewer than TOKENS
    ids = torch.arange(TOKENS, device=model.device) % model.config.vocab_size
    positions = torch.arange(TOKENS, device=model.device)[None]
    # random weights serve as well as trained ones, because both attentions compute with the same weights
    model_logits = _compute_own_logits(model, ids, positions)
    with torch.no_grad(), attached(model):
        later_layers, _ = _read_tokens(model, ids, positions + SHIFT)
        with _recording_projections(model) as outputs:
            layers, logits = _read_tokens(model, ids, positions)
    # the two attentions sum in different orders, and half precision then differs by more
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    # own logits that are no numbers can be compared with nothing, and are refused when a prompt is read
    is_comparable = bool(model_logits.isfinite().all())
    # "not <=" and not ">", so that NaN counts as different
    if is_comparable and not _relative_distance(logits, model_logits) <= tolerance:
        raise UsageError(
            f"the model family {model.config.model_type!r} does not run in kvbench: under its attention function the "
            "logits are not the model's own"
        )
    places = [i for i, index in enumerate(key_layers(model.config)) if index in compressed_layers(model.config)]
    frequencies: list[Tensor | None] = []
    for place, stated in zip(places, stated_frequencies(model), strict=True):
        frequencies.append(_find_turn(layers[place], later_layers[place], stated, tolerance))
    unrolled, mixed = None, None
    if None in frequencies:
        unrolled = "its keys at other positions are not its keys rotated"
    compressed = [layers[place] for place in places]
    if not _are_projected(compressed, outputs, frequencies, positions=positions, tolerance=tolerance):
        mixed = "its cached keys and values are not what its projections give"
    return Probe(unrolled=unrolled, mixed=mixed, frequencies=tuple(frequencies))


def _compute_own_logits(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the logits [T, V] of tokens [T] at positions [1, T] under transformers' plain attention."""
    attention = model.config._attn_implementation
    with torch.no_grad(), evaluating(model):
        model.set_attn_implementation("eager")
        try:
            return model(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0]
        finally:
            model.set_attn_implementation(attention)


@contextmanager
def _recording_projections(model: PreTrainedModel) -> Iterator[dict[tuple[int, str], Tensor]]:
    """While the context is open, record the outputs [1, T, H D] of k_proj and v_proj of each compressed layer.

    The context yields the outputs by (layer, name of the projection). A later call replaces an earlier one.
    """
    outputs: dict[tuple[int, str], Tensor] = {}

    def make_recorder(key: tuple[int, str]) -> Callable[[nn.Module, object, Tensor], None]:
        """Return a forward hook that records a projection's output under ``key``."""

        def record(module: nn.Module, args: object, output: Tensor) -> None:
            """Record the output of a projection (a forward hook)."""
            outputs[key] = output

        return record

    with ExitStack() as stack:
        for i, module in enumerate(compressed_modules(model)):
            for name in ("k_proj", "v_proj"):
                if hasattr(module, name):
                    hook = getattr(module, name).register_forward_hook(make_recorder((i, name)))
                    stack.callback(hook.remove)
        yield outputs


def _find_turn(layer: ProbeLayer, later_layer: ProbeLayer, stated: Tensor | None, tolerance: float) -> Tensor | None:
    """Return the frequencies that turn a layer's keys and queries by SHIFT positions, as the later reading has them.

    The result is ``stated``, or zeros if the layer does not rotate, or None.

    layer, later_layer: the layer after the tokens were read at their positions, and SHIFT positions later.
    stated: the frequencies that the model states for the layer.
    tolerance: the relative distance that counts as equal.
    """
    if stated is None:
        return None
    for frequencies in (stated, torch.zeros_like(stated)):
        rotary = Rotary(frequencies)
        pairs = ((layer.k, later_layer.k), (layer.query, later_layer.query))
        # "<=" is false for NaN, which counts as different
        if all(_relative_distance(rotary.turn(a, start=0, end=SHIFT), b) <= tolerance for a, b in pairs):
            return frequencies
    return None


def _are_projected(
    layers: Sequence[ProbeLayer],
    outputs: Mapping[tuple[int, str], Tensor],
    frequencies: Sequence[Tensor | None],
    *,
    positions: Tensor,
    tolerance: float,
) -> bool:
    """Return True if each layer caches its k_proj's output, rotated by ``positions``, and its v_proj's output.

    outputs: the projections' outputs [1, T, H D] by (layer, name of the projection).
    frequencies: the rotation of each layer; None: its keys are compared without rotation.
    tolerance: the relative distance that counts as equal.
    """
    # two outputs a layer, unless some layer has no k_proj or no v_proj
    are_projected = len(outputs) == 2 * len(layers)
    for (i, name), output in outputs.items():
        cached = layers[i].k if name == "k_proj" else layers[i].v
        # [1, T, H D] -> [1, H, T, D]
        expected = output.unflatten(-1, (cached.shape[1], -1)).transpose(1, 2)
        rotation = frequencies[i]
        if name == "k_proj" and rotation is not None:
            expected = Rotary(rotation).turn(expected, start=0, end=positions)
        # "not <=" and not ">", so that NaN counts as different
        if not _relative_distance(expected, cached) <= tolerance:
            are_projected = False
    return are_projected


def _read_tokens(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> tuple[list[ProbeLayer], Tensor]:
    """Return (layers, logits [T, V]) after the model has read tokens [T] at positions [1, T] in one pass."""
    config = model.config
    layers = [ProbeLayer() for _ in key_layers(config)]
    all_layers = in_model_order(config, layers, state_layers_of(config, layers))
    output = model(input_ids=ids[None], position_ids=positions, **model_cache(config, all_layers))
    return layers, output.logits[0]


def _relative_distance(a: Tensor, b: Tensor) -> float:
    """Return the relative distance |a - b| / |b| in Euclidean norms. It is NaN if a number of either is NaN."""
    b32 = b.float()
    # a model's layers may lie on several devices
    difference = a.to(b32.device).float() - b32
    # the lower limit of |b| avoids division by 0
    return float(difference.norm() / b32.norm().clamp_min(1e-30))

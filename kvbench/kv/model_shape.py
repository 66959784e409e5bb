"""The shape of a model's cache, read from conf/model or from a checkpoint's configuration.

Because conf/model states it, bytes can be computed without a checkpoint. Configurations are those of transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, TypeVar

from kvbench.base.errors import UsageError
from kvbench.kv.state import state_bytes

T = TypeVar("T")
POSITION_BYTES = 4
"""The bytes of a token's position, which is stored as int32."""
HOLD_STATES = ("linear_attention", "conv", "hybrid")
"""The types of layers, as transformers names them, that hold a state of a fixed size. State space is linear attention.

A hybrid layer also holds keys and values.
"""
CHUNKED = "chunked_attention"
"""The type of layers, as transformers names it, in which a token attends its own chunk of the text."""
KEYLESS = ("linear_attention", "conv", "mlp", "moe")
"""The types of layers that hold no keys and values. MLPs and experts (moe) hold nothing of the text."""

MAY_BE_ZERO = (
    "keyless_layers",
    "conv_numbers",
    "recurrent_numbers",
    "latent_width",
    "expanded_numbers",
    "indexer_numbers",
    "local_kv_heads",
    "local_head_dim",
    "sharing_layers",
)
"""The fields of ``Shape`` that are 0 for many models."""


@dataclass(frozen=True)
class CacheShape:
    """The sizes by which a model's cache is audited.

    kv_heads, head_dim, own_values: as in ``Shape``, for the layers that methods compress.
    itemsize: the bytes of one number.
    local_heads: the (kv heads, head dimension) of local layers; None: those of the other layers.
    """

    kv_heads: int
    head_dim: int
    itemsize: int
    own_values: bool = False
    local_heads: tuple[int, int] | None = None


@dataclass(frozen=True)
class Shape:
    """Layers, heads (Hq query heads in groups over Hk kv heads) and head dimension D.

    layers: the layers that methods compress: those that attend all tokens. In a model whose layers all slide, these
    are compressed, and none counts as local.
    local_layers: layers that attend and hold only the last ``window`` tokens, or a chunk of so many. Formats code
    their tokens; no other method compresses them.
    local_kv_heads, local_head_dim: the kv heads and the head dimension of local layers; 0: those of the other layers.
    sharing_layers: layers at the model's end that read the keys and values of an earlier layer and hold none.
    keyless_layers: layers that hold no keys: linear attention, state space, convolution, or nothing but an MLP.
    conv_numbers, recurrent_numbers: how many numbers the states of all layers are; 0 as long as nobody has counted.
    latent_width: the width of the latent that stands for keys and values of all query heads (``kv.own_values``). Keys
    have it and their rotated part as channels, under one kv head. 0: the model holds keys and values.
    expanded_numbers: how many numbers the keys and values of all query heads are that a latent stands for; 0: unknown.
    indexer_numbers: how many numbers a key of the model's indexer has. kvbench holds none of these keys
    (``models.indexer``). 0: the model has no indexer.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    local_layers: int = 0
    window: int = 0
    keyless_layers: int = 0
    conv_numbers: int = 0
    recurrent_numbers: int = 0
    latent_width: int = 0
    expanded_numbers: int = 0
    indexer_numbers: int = 0
    local_kv_heads: int = 0
    local_head_dim: int = 0
    sharing_layers: int = 0

    def __post_init__(self) -> None:
        """Raise UsageError if a number is not possible, by itself or beside the others."""
        has_local = bool(self.local_layers or self.window)
        may_be_zero = set(MAY_BE_ZERO)
        if not has_local:
            # a model has both local layers and a window, or neither of them
            may_be_zero |= {"local_layers", "window"}
        for name, value in asdict(self).items():
            least = 0 if name in may_be_zero else 1
            # Python counts True and False as integers
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"model.shape.{name}={value!r} is not possible: a whole number, {least} or more")
        if self.own_values and (self.kv_heads != 1 or self.latent_width > self.head_dim):
            raise UsageError(
                f"model.shape.latent_width={self.latent_width} is not possible beside kv_heads={self.kv_heads} and "
                f"head_dim={self.head_dim}: a latent is one kv head, at most as wide as head_dim"
            )
        if (self.local_kv_heads or self.local_head_dim) and not has_local:
            raise UsageError(
                f"model.shape.local_kv_heads={self.local_kv_heads} and local_head_dim={self.local_head_dim} are not "
                "possible without local_layers and window: leave them out"
            )
        if self.local_kv_heads and self.query_heads % self.local_kv_heads:
            raise UsageError(
                f"model.shape.query_heads={self.query_heads} is not possible: a multiple of "
                f"local_kv_heads={self.local_kv_heads}"
            )
        if self.query_heads % self.kv_heads:
            raise UsageError(
                f"model.shape.query_heads={self.query_heads} is not possible: a multiple of kv_heads={self.kv_heads}"
            )

    @property
    def own_values(self) -> bool:
        """True if the layers hold latents: then keys are their own values, and no values are stored."""
        return self.latent_width > 0

    @property
    def value_dim(self) -> int:
        """The number of channels that a head stores for a value: 0 if keys are their own values."""
        if self.own_values:
            return 0
        return self.head_dim

    @property
    def token_numbers(self) -> int:
        """The count of numbers that one head stores for a token, in its key and its value together."""
        return self.head_dim + self.value_dim

    @property
    def has_states(self) -> bool:
        """True if layers hold a state of a fixed size, in place of keys or beside them."""
        return bool(self.conv_numbers or self.recurrent_numbers)

    @property
    def all_layers(self) -> int:
        """The number of the model's layers, with those that no method compresses."""
        return self.layers + self.local_layers + self.keyless_layers + self.sharing_layers

    def cache_shape(self, itemsize: int) -> CacheShape:
        """Return the sizes by which a cache whose numbers take ``itemsize`` bytes is audited."""
        return CacheShape(
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            itemsize=itemsize,
            own_values=self.own_values,
            local_heads=self.local_heads,
        )

    @property
    def local_heads(self) -> tuple[int, int]:
        """The (kv heads, head dimension) of local layers."""
        # 0 stands for those of the other layers
        return self.local_kv_heads or self.kv_heads, self.local_head_dim or self.head_dim

    def full_bytes(self, tokens: int, itemsize: int, heads: int | None = None) -> int:
        """Return the bytes of the full cache after ``tokens`` tokens, over all layers.

        Layers that methods compress store all tokens under ``heads`` heads (default: the kv heads). Local layers store
        the tokens of their window, under heads of their own. States are counted, too.
        """
        compressible = self.layers * self.layer_bytes(tokens, itemsize, heads)
        return compressible + self.local_bytes(tokens, itemsize) + self.state_bytes(itemsize)

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of all states, which are the same for a text of any length."""
        return state_bytes(self.conv_numbers, self.recurrent_numbers, itemsize)

    def local_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of the keys and values that all local layers store after ``tokens`` tokens."""
        return self.local_layers * self.local_layer_bytes(min(tokens, self.window), itemsize)

    def layer_bytes(self, tokens: int, itemsize: int, heads: int | None = None) -> int:
        """Return the bytes of ``tokens`` tokens in one layer that methods compress, stored under ``heads`` heads.

        Without ``heads``, they are stored under the kv heads.
        """
        return (heads or self.kv_heads) * tokens * self.token_numbers * itemsize

    def local_layer_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of the keys and values of ``tokens`` tokens in one local layer."""
        kv_heads, head_dim = self.local_heads
        # 2: keys and values
        return 2 * kv_heads * tokens * head_dim * itemsize

    @property
    def note(self) -> str | None:
        """A note for readers of results on layers that hold other data than keys and values of all tokens, or None."""
        notes = []
        if self.own_values:
            expanded = ""
            if self.expanded_numbers:
                expanded = f", in place of {self.expanded_numbers:,} of the heads' own keys and values"
            notes.append(
                f"A token's keys and values are one latent for all heads: {self.latent_width} numbers, and "
                f"{self.head_dim - self.latent_width} of a rotated key beside it{expanded}. Methods compress the "
                "latent, and bytes count it."
            )
        if self.indexer_numbers:
            notes.append(
                f"The indexer's keys, {self.indexer_numbers} numbers a token where a layer has an indexer, are not "
                "held and count in no bytes: a text stays within the tokens that the indexer chooses."
            )
        layers = self._layers_note
        if layers is not None:
            notes.append(layers)
        return " ".join(notes) or None

    @property
    def _layers_note(self) -> str | None:
        """A note on layers that no method compresses; None if the model has no such layers."""
        if self.keyless_layers:
            local = ""
            if self.local_layers:
                local = f", {self.local_layers} of them only those of a window of {self.window} tokens"
            return (
                f"{self.layers + self.local_layers} of {self.all_layers} layers hold keys and values{local}. Methods, "
                f"budgets and tokens kept concern {self.layers} layers. Bytes are those of all layers, with the states "
                "of the others."
            )
        if self.has_states:
            return "All layers hold a state beside their keys: no method compresses it, and bytes count it."
        if self.sharing_layers:
            return (
                f"{self.sharing_layers} of {self.all_layers} layers hold nothing: each reads the cache of an earlier "
                f"layer, as that layer's method leaves it. {self.local_layers} are local (window {self.window}), and "
                f"formats alone compress them. Methods, budgets and tokens kept concern the other {self.layers}; bytes "
                "are those of all layers."
            )
        if not self.local_layers:
            return None
        return (
            f"{self.local_layers} of {self.all_layers} layers are local (window {self.window}), and formats alone "
            f"compress them. Methods, budgets and tokens kept concern the other {self.layers}; bytes are those of "
            "all layers."
        )

    def __str__(self) -> str:
        others = ""
        if self.local_layers:
            others = f" and {self.local_layers} local ones (window {self.window})"
        if self.keyless_layers:
            others += f" and {self.keyless_layers} without keys"
        if self.sharing_layers:
            others += f" and {self.sharing_layers} that share"
        text = (
            f"{self.layers} layers{others}, {self.query_heads} query and {self.kv_heads} kv heads of dimension "
            f"{self.head_dim}"
        )
        if self.own_values:
            text += f" (a latent of {self.latent_width} and a rotated part of {self.head_dim - self.latent_width})"
        if self.has_states:
            text += f", and states of {self.conv_numbers + self.recurrent_numbers:,} numbers"
        return text


def from_entry(entry: Mapping[str, int]) -> Shape:
    """Return the shape that an entry of conf/model has. Raises UsageError if a field is missing, unknown or wrong."""
    names = [f.name for f in fields(Shape)]
    needed = [f.name for f in fields(Shape) if f.default is MISSING]
    missing, unknown = set(needed) - set(entry), set(entry) - set(names)
    if missing or unknown:
        raise UsageError(
            f"model.shape={dict(entry)} is not possible: a mapping with {', '.join(needed)}, all of them, and with "
            "local_layers and window where the model has local layers, keyless_layers, conv_numbers and "
            "recurrent_numbers where it has layers with states, latent_width and expanded_numbers where it has "
            "latents, indexer_numbers where it has an indexer, local_kv_heads and local_head_dim where local layers "
            "have other heads, sharing_layers where layers share keys and values"
        )
    return Shape(**entry)


def layer_types(config: Any) -> tuple[str, ...]:
    """Return the type of each layer as transformers names it. Without types, all layers attend everything.

    Layers at the end that share an earlier layer's keys and values are left out: they have no layer in the cache.
    """
    types = getattr(config, "layer_types", None)
    if not types:
        # some configurations have only the number of layers
        return ("full_attention",) * int(getattr(config, "num_hidden_layers", 0))
    return tuple(types)[: len(types) - sharing_layers(config)]


def sharing_layers(config: Any) -> int:
    """Return how many layers at the model's end read the keys and values of an earlier layer and hold none."""
    # the attribute is missing or None for models whose layers share nothing
    return int(getattr(config, "num_kv_shared_layers", None) or 0)


def lending_layers(config: Any) -> frozenset[int]:
    """Return the numbers of the layers whose keys and values later layers read as well.

    For each type of layer it is the last layer with keys and values of its own.
    """
    if not sharing_layers(config):
        return frozenset()
    # a later layer of the same type takes the place of an earlier one
    last_of_type = {kind: i for i, kind in enumerate(layer_types(config))}
    return frozenset(last_of_type.values())


def layer_heads(config: Any, layer: int) -> tuple[int, int]:
    """Return (kv heads, head dimension) of a layer."""
    layer_config = config
    # Gemma 4's layers that attend everything have other heads than its local ones
    if getattr(config, "is_heterogeneous", False):
        layer_config = config.per_layer_config[layer]
    heads = int(layer_config.num_attention_heads)
    # configurations without grouped queries have no num_key_value_heads
    kv_heads = int(getattr(layer_config, "num_key_value_heads", None) or heads)
    # without a head_dim, the heads divide the hidden size
    head_dim = int(getattr(layer_config, "head_dim", None) or layer_config.hidden_size // heads)
    return kv_heads, head_dim


def latent_width(config: Any) -> int:
    """Return the width of the latent that each token has in place of keys and values; 0 for models without latents."""
    return int(getattr(config, "kv_lora_rank", None) or 0)


def indexer_reach(config: Any) -> int | None:
    """Return how many tokens the model's indexer chooses for each query; None for models without an indexer."""
    reach = getattr(config, "index_topk", None)
    if reach is None:
        return None
    return int(reach)


def indexer_numbers(config: Any) -> int:
    """Return how many numbers a key of the model's indexer has; 0 for models without an indexer."""
    if indexer_reach(config) is None:
        return 0
    return int(getattr(config, "index_head_dim", None) or 0)


def key_layers(config: Any) -> tuple[int, ...]:
    """Return the numbers of the layers that hold keys and values, in order."""
    return tuple(i for i, kind in enumerate(layer_types(config)) if kind not in KEYLESS)


def state_layers(config: Any) -> tuple[int, ...]:
    """Return the numbers of the layers that hold a state of a fixed size, in order."""
    return tuple(i for i, kind in enumerate(layer_types(config)) if kind in HOLD_STATES)


def local_layers(config: Any) -> frozenset[int]:
    """Return the numbers of the local layers, which attend a window or a chunk while other layers attend all tokens.

    The set is empty if all layers attend alike.
    """
    types = layer_types(config)
    # where all layers slide, methods compress all of them under the model's own window
    if len(set(types).difference(KEYLESS)) < 2:
        return frozenset()
    if chunk_size(config) is not None:
        return frozenset(i for i, kind in enumerate(types) if kind == CHUNKED)
    # without a window, layers of the type sliding_attention attend all tokens, too
    if getattr(config, "sliding_window", None) is None:
        return frozenset()
    return frozenset(i for i, kind in enumerate(types) if kind == "sliding_attention")


def compressed_layers(config: Any) -> list[int]:
    """Return the numbers of the layers that methods compress: those with keys that are not local."""
    local = local_layers(config)
    return [i for i in key_layers(config) if i not in local]


def in_key_order(config: Any, compressed: Iterable[T], local: Iterable[T]) -> list[T]:
    """Return the items of all layers with keys, in the model's order, from those of compressed and of local layers."""
    are_local = local_layers(config)
    remaining, remaining_local = iter(compressed), iter(local)
    return [next(remaining_local if i in are_local else remaining) for i in key_layers(config)]


def chunk_size(config: Any) -> int | None:
    """Return how many tokens a chunk has, if the model has layers that attend chunks; None for other models.

    A text is cut into chunks from its beginning. A token attends the tokens of its own chunk.
    """
    if CHUNKED not in layer_types(config):
        return None
    return int(config.attention_chunk_size)


def from_config(config: Any) -> Shape:
    """Return the shape of a checkpoint, read from its Hugging Face configuration.

    The numbers of states are left at 0, because a configuration does not tell them.
    """
    local, with_keys = local_layers(config), key_layers(config)
    kv_heads, head_dim = _read_compressed_heads(config)
    window, local_kv_heads, local_head_dim = 0, 0, 0
    if local:
        # where layers attend chunks, a chunk is the window
        window = chunk_size(config) or int(config.sliding_window)
        # the first local layer stands for all: ``traits.check_served`` refuses other models
        heads_of_local = layer_heads(config, min(local))
        if heads_of_local != (kv_heads, head_dim):
            local_kv_heads, local_head_dim = heads_of_local
    return Shape(
        layers=len(with_keys) - len(local),
        query_heads=int(config.num_attention_heads),
        kv_heads=kv_heads,
        head_dim=head_dim,
        local_layers=len(local),
        window=window,
        keyless_layers=int(config.num_hidden_layers) - sharing_layers(config) - len(with_keys),
        latent_width=latent_width(config),
        expanded_numbers=_count_expanded_numbers(config),
        indexer_numbers=indexer_numbers(config),
        local_kv_heads=local_kv_heads,
        local_head_dim=local_head_dim,
        sharing_layers=sharing_layers(config),
    )


def _read_compressed_heads(config: Any) -> tuple[int, int]:
    """Return (kv heads, head dimension) of the layers that methods compress."""
    latent = latent_width(config)
    if latent:
        # all query heads have one key: the latent with the rotated part behind it
        return 1, latent + int(config.qk_rope_head_dim)
    compressed = compressed_layers(config)
    # the first layer stands for all: ``traits.check_served`` refuses other models. A model without a layer to compress
    # is described by its layer 0 until ``Shape`` refuses it
    first = compressed[0] if compressed else 0
    return layer_heads(config, first)


def _count_expanded_numbers(config: Any) -> int:
    """Return how many numbers of the query heads' own keys and values a latent stands for; 0 without latents."""
    if not latent_width(config):
        return 0
    # a head has a key, which has a part without and a part with rotation, and a value
    key_numbers = int(config.qk_nope_head_dim) + int(config.qk_rope_head_dim)
    return int(config.num_attention_heads) * (key_numbers + int(config.v_head_dim))

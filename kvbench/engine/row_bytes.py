"""Bytes of keys and values that decoding holds of each row, from the tensors that hold them.

A row's share of a tensor is what the tensor costs a token, times the row's own tokens: padding to the longest row, free
slots and room for tokens to come belong to the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from kvbench.cache.partly_packed import Values, parts
from kvbench.cache.segment import storage_bytes
from kvbench.engine.decode_layer import RowLayer
from kvbench.storage.evicting_rows import SlotRows
from kvbench.storage.evicting_store import OneFormat, Thin
from kvbench.storage.latent_rows import LatentRows
from kvbench.storage.packed_rows import CodedRows, PackedStore
from kvbench.storage.row_segments import Ragged, RowSegment


def stored_bytes(layer: RowLayer) -> list[int]:
    """Payload bytes behind the tokens of each row of a decode batch, in one layer."""
    found, tailed = [0] * len(layer.starts), set()
    for group in layer.groups:
        rows = group.rows.tolist()
        if group.coded is None:
            tailed.update(rows)
            held = [_segment(s) for s in group.segments]
        elif isinstance(group.coded, CodedRows):
            held = [_coded(group.coded.k), _coded(group.coded.v)]
        else:
            held = [_latent(group.coded)]
        for column in held:
            for row, size in zip(rows, column, strict=True):
                found[row] += size
    if layer.keys is not None and layer.values is not None:
        for row in tailed:
            found[row] += layer.used * sum(_each(t, t.shape[0] * t.shape[2]) for t in (layer.keys, layer.values))
    for where, slots in layer.slots:
        for row, size in zip(where.tolist(), _slots(slots), strict=True):
            found[row] += size
    return found


def allocated(layers: Sequence[RowLayer]) -> int:
    """Bytes of all storage behind a decode batch: padding, free slots, positions and room for tokens to come, too."""
    return storage_bytes(t for layer in layers for t in _behind(layer))


def _behind(x: Any) -> Iterator[Tensor]:
    """The tensors that a layer of a decode batch holds, in whatever it keeps them; the model's weights are not its."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for item in x:
            yield from _behind(item)
    elif isinstance(x, Mapping):
        yield from _behind(list(x.values()))
    elif type(x).__module__.startswith(("kvbench.cache.", "kvbench.storage.", "kvbench.engine.")):
        yield from _behind(list(vars(x).values()))


def _segment(s: RowSegment | Ragged) -> list[int]:
    if isinstance(s, Ragged):
        return [tokens * sum(_each(t, len(t)) for t in (s.k, s.v)) for tokens in s.lengths.sum(dim=1).tolist()]
    u, length = s.v.shape[0], s.v.shape[2]
    own = [length] * u if s.valid is None else s.valid.sum(dim=(1, 2)).tolist()
    return [tokens * sum(_each(t, u * length) for t in (s.k, s.v)) for tokens in own]


def _coded(store: PackedStore) -> list[int]:
    codes = tuple(store.codes.payload())
    groups = codes[0].shape[0] * codes[0].shape[2]
    old = sum(_each(t, groups) for t in codes)
    new = _each(store.ring, store.ring.shape[0] * store.slots)
    return [p // store.step * old + (n - p) * new for p, n in zip(store.packed, store.total, strict=True)]


def _latent(rows: LatentRows) -> list[int]:
    return [n * sum(_each(t, t.shape[0] * t.shape[1]) for t in (rows.k, rows.v)) for n in rows.total]


def _slots(slots: SlotRows) -> list[int]:
    held = slots.valid.sum(dim=(1, 2)).tolist()
    store = slots.store
    if isinstance(store, OneFormat):
        return [n * _by_slot(store.k, store.v) for n in held]
    assert isinstance(store, Thin)
    whole = (store.whole & slots.valid.gather(2, store.slot)).sum(dim=(1, 2)).tolist()
    others = [t for t in (store.k.others, store.v.others) if t is not None]
    thin = _by_slot(store.k.kept, store.v.kept)
    return [n * thin + w * _by_slot(*others) for n, w in zip(held, whole, strict=True)]


def _by_slot(*held: Values) -> int:
    """Bytes of one slot of one head."""
    return sum(_each(t, t.shape[:3].numel()) for t in _tensors(held))


def _tensors(held: Sequence[Values]) -> Iterator[Tensor]:
    for x in held:
        yield from parts(x)


def _each(t: Tensor, places: int) -> int:
    """Bytes of a tensor that has so many places, per place."""
    return t.nbytes // places if places else 0

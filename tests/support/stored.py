"""Cells and samples for tests of the store, without a plan, a model or a run."""

import hashlib
from dataclasses import dataclass
from types import SimpleNamespace

NAMES = {}
FACTS = {"device": "cpu", "torch": "2"}


def cell_id(name):
    """The id of the cell that tests call ``name``; ``NAMES`` has the way back."""
    actual = hashlib.sha256(name.encode()).hexdigest()[:16]
    NAMES[actual] = name
    return actual


@dataclass(frozen=True)
class Cell:
    """As much of a plan's cell as the store reads."""

    name: str = "coffee"
    label: str = "snapkv"
    column: str = "tiny/needle"
    size: int = 4

    @property
    def id(self):
        return cell_id(self.name)

    @property
    def identity(self):
        return {"task": self.column}

    @property
    def task(self):
        return SimpleNamespace(examples=tuple(range(self.size)))


def sample(number, **more):
    """Sample ``number``, with all that metrics are made from, and text that tempts line breaks and quotes."""
    return {
        "id": f"e{number}",
        "score": (number * 0.37) % 1,
        "prediction": f'é\u2028\n, "crc": {number}}}\x00漢',
        "n": 100 + number,
        "kept": 25.0 + number / 3,
        "nominal": 25.0,
        "payload": 1000 * number,
        "overhead": 17,
        "payload_kv_head": 1000 * number,
        "payload_query_head": 2000 * number,
        "full_bytes": 4096,
        "payload16": 500 * number,
        "overhead16": 17,
        "full16": 2048,
        "decode_peak": number,
        "cut": 0,
        "shrunk": False,
        "new_tokens": 3 + number,
        "meta": {"length": 100 + number},
        "timing": {"prefill_s": 0.1 / (number + 1), "compress_s": 0.01, "decode_s": 0.3 / (number + 1)},
        **more,
    }


def measure(store, cell, numbers, shard=0):
    writer = store.open(cell, FACTS, shard, mix=False)
    for number in numbers:
        writer.append(sample(number))
    writer.close()

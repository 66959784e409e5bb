"""W&B's offline files read back, without W&B's own reader: a LevelDB log of protobuf records."""

import json
import struct
import time
from pathlib import Path

BLOCK, HEADER = 32768, 7
FULL, FIRST, LAST = 1, 2, 4


def records(path):
    """The records of one run-*.wandb file, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = Path(path).read_bytes()
    assert data[:4] in (b":W&B", b"")
    at, part = HEADER, b""
    while at + HEADER <= len(data):
        room = BLOCK - at % BLOCK
        if room < HEADER:
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        part += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(part)
            part = b""
            yield record
        elif not kind:
            break


def read(path):
    """What one file holds: the run's facts, config, the rows of its history by step, its summary, and how it ended."""
    actual = {"id": None, "config": {}, "rows": {}, "summary": {}, "exit": None}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            actual |= {"id": run.run_id, "group": run.run_group, "name": run.display_name, "project": run.project}
            actual["job_type"] = run.job_type
            _update(actual["config"], run.config.update)
        elif kind == "config":
            _update(actual["config"], record.config.update)
        elif kind == "history":
            row = {}
            _update(row, record.history.item)
            actual["rows"].setdefault(int(row["_step"]), {}).update(row)
        elif kind == "summary":
            _update(actual["summary"], record.summary.update)
        elif kind == "exit":
            actual["exit"] = record.exit.exit_code
    return actual


def _update(target, items):
    for item in items:
        target["/".join(item.nested_key) or item.key] = json.loads(item.value_json)


def runs(results):
    """Every offline run below a results folder: id -> what its files hold, in the order of their start."""
    collected = {}
    for path in sorted(Path(results).glob("wandb/offline-run-*/run-*.wandb")):
        collected.setdefault(path.stem.removeprefix("run-"), []).append({**written(path), "folder": path.parent})
    return collected


def written(path, patience=20.0):
    """What a file holds once W&B's own process has written it, which may be a while after ``finish``."""
    end = time.monotonic() + patience
    while (actual := read(path))["id"] is None and time.monotonic() < end:
        time.sleep(0.1)
    return actual

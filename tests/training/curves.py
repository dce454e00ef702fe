"""Reads the curves that logging services leave in a run folder."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

Curve = dict[int, float]


def read_curve(service: str, run: Path, name: str) -> Curve:
    """step -> value of one curve; {} where the service left none of that name."""
    return {"wandb": wandb_curve, "tensorboard": tensorboard_curve}[service](run, name)


def tensorboard_curve(run: Path, name: str) -> Curve:
    """From the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Curve = {}
    for path in (run / "tensorboard").rglob("events*"):
        events = EventAccumulator(str(path)).Reload()
        if name in events.Tags()["scalars"]:
            found |= {event.step: event.value for event in events.Scalars(name)}
    return found


def wandb_curve(run: Path, name: str) -> Curve:
    """From the one file of an offline run, which ends here as it otherwise does with the process."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.finish()
    (path,) = (run / "wandb").glob("offline-run-*/*.wandb")
    found: Curve = {}
    for content in records(path.read_bytes()):
        record = Record.FromString(content)
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if name in items:
            found[int(items["train/global_step"])] = json.loads(items[name])
    return found


def records(content: bytes) -> Iterator[bytes]:
    """A wandb file: 7 bytes of header, then LevelDB's log format (blocks of 32 KiB; crc, length, kind, bytes)."""
    at, whole = 7, b""
    while at + 7 <= len(content):
        left = -at % 32768
        if 0 < left < 7:  # no header fits: the block's end is filled up
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of a record, or its last part
            yield whole
            whole = b""

"""What lies in a run's checkpoint folder, whether it is whole, and how to be rid of it. No array is read."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from longtrain import digests, runlock
from longtrain.checkpoint import folder_of
from longtrain.errors import CheckpointError, ConfigError, Problem
from longtrain.metrics import JSONL

ITEMS = ("parameters", "optimizer", "run")

COMPLETE, UNFINISHED, SET_ASIDE = "complete", "unfinished", "set aside"

LEGAL_RULES = "keep=N (all but the newest N), keep=N,every=M (nor those of every M-th step), or leftovers"


@dataclass(frozen=True)
class Entry:
    """A folder among a run's checkpoints. `step` None: it is no step's. The losses are those of the step's metrics."""

    path: Path
    step: int | None
    state: str
    bytes: int
    saved: datetime
    loss: float | None
    eval_loss: float | None

    @property
    def is_complete(self) -> bool:
        return self.state == COMPLETE

    def __str__(self) -> str:
        losses = {"loss": self.loss, "eval": self.eval_loss}
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in losses.items() if value is not None)
        hours = (datetime.now(UTC) - self.saved).total_seconds() / 3600
        age = f"{hours:.1f} h ago" if hours < 48 else f"{hours / 24:.1f} days ago"
        return f"{self.path.name:>8}  {self.bytes / 2**20:12,.1f} MiB  {age:>14}  {self.state}  {numbers}".rstrip()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.path.name,
            "step": self.step,
            "state": self.state,
            "bytes": self.bytes,
            "saved": self.saved.isoformat(),
            "loss": self.loss,
            "eval_loss": self.eval_loss,
        }


def entries(run_dir: Path) -> list[Entry]:
    """Everything in the folder, steps in order first.

    Raises:
      CheckpointError: when there is no such folder, or it cannot be read.
    """
    folder = folder_of(run_dir)
    losses = _losses(run_dir)
    try:
        found = [_entry(path, losses) for path in folder.iterdir() if path.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror or error}") from error
    return sorted(found, key=lambda one: (one.step is None, one.step or 0, one.path.name))


def _entry(path: Path, losses: dict[int, dict[str, Any]]) -> Entry:
    step = int(path.name) if path.name.isdigit() else None
    missing = [item for item in ITEMS if not (path / item).is_dir()]
    if step is None:
        state = SET_ASIDE if re.match(r"(damaged|superseded)-\d+", path.name) else UNFINISHED
    else:
        state = f"incomplete: no {', '.join(missing)}" if missing else COMPLETE
    line = losses.get(step, {}) if step is not None else {}
    return Entry(
        path=path,
        step=step,
        state=state,
        bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        saved=datetime.fromtimestamp(path.stat().st_mtime, UTC),
        loss=line.get("loss"),
        eval_loss=line.get("eval_loss"),
    )


def _losses(run_dir: Path) -> dict[int, dict[str, Any]]:
    """By step, what its lines of metrics.jsonl say; what is no step's line says nothing."""
    lines: dict[int, dict[str, Any]] = {}
    path = run_dir / JSONL
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
            lines.setdefault(line["step"], {}).update(line)
        except (ValueError, KeyError, TypeError):
            continue  # torn, or no step's
    return lines


def verify(entry: Entry) -> tuple[bool, str]:
    """Whether every file of a complete checkpoint is what was written, and what was found. Reads all of it."""
    try:
        said = digests.verify(entry.path, ITEMS, 0, 1)
    except (OSError, ValueError) as error:
        return False, str(error)
    return "NOT VERIFIED" not in said, said


@dataclass(frozen=True)
class Rule:
    """What is to be deleted: all that is no complete checkpoint (`leftovers`), or complete ones but the newest `keep`
    and those of every `every`-th step. Never the newest."""

    leftovers: bool = False
    keep: int = 1
    every: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """
        Raises:
          ConfigError: for what is not in LEGAL_RULES.
        """
        if text == "leftovers":
            return cls(leftovers=True)
        match = re.fullmatch(r"keep=([1-9]\d*)(?:,every=([1-9]\d*))?", text)
        if match is None:
            raise ConfigError([Problem("--delete", text, f"legal: {LEGAL_RULES}")], "the command line")
        return cls(keep=int(match[1]), every=int(match[2]) if match[2] else None)

    def takes(self, found: list[Entry]) -> list[Entry]:
        if self.leftovers:
            return [one for one in found if not one.is_complete]
        complete = [one for one in found if one.is_complete]
        return [one for one in complete[: -self.keep] if not self.every or (one.step or 0) % self.every]


def delete(run_dir: Path, doomed: list[Entry], say: Callable[[str], None]) -> None:
    """Takes them away, each under another name first, so that what is half gone is no checkpoint's.

    Raises:
      ConfigError: while a run is training in the folder.
      CheckpointError: when one cannot be deleted.
    """
    with runlock.held(run_dir, say):
        for one in doomed:
            gone = one.path.with_name(f"deleting-{one.path.name}")
            try:
                os.replace(one.path, gone)
                shutil.rmtree(gone)
            except OSError as error:
                raise CheckpointError(f"{one.path}: cannot be deleted: {error.strerror or error}") from error
            say(f"deleted {one.path}")

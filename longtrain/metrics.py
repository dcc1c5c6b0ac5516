"""What a run tells of itself: `metrics.jsonl`, TensorBoard, and the line on the terminal."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, SupportsFloat

from rich.console import Console
from rich.live import Live
from rich.text import Text

from longtrain.errors import CheckpointError

JSONL = "metrics.jsonl"
PLAIN_LINE_SECONDS = 5.0


def finite_or_none(value: SupportsFloat) -> float | None:
    """JSON has no NaN: null says that a number was not finite."""
    number = float(value)
    return number if math.isfinite(number) else None


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Where a file of the run cannot be written, nor will its checkpoints be: the same exit code."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: cannot be written: {error.strerror or error}") from error


class Metrics:
    """Writes each logged step once, in both places. Only process 0 makes one.

    Opening it for a run resumed at `step` first drops every line beyond that step, and a torn last line.

    Args:
      run_dir: the run's folder.
      step: the last step that counts; 0 for a new run.
      tensorboard: write event files as well.

    Raises:
      CheckpointError: when a file cannot be written, at any time.
    """

    def __init__(self, run_dir: Path, *, step: int, tensorboard: bool):
        self.path = run_dir / JSONL
        self._board: Any = None
        with disk_errors(self.path):
            run_dir.mkdir(parents=True, exist_ok=True)
            _keep_lines_up_to(self.path, step)
            self._file = self.path.open("a", encoding="utf-8")
            if tensorboard:
                from tensorboardX import SummaryWriter  # slow to import, and not every run wants it

                # Readers drop what an earlier process wrote from here on, be it killed before its first checkpoint.
                self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)

    def write(self, line: dict[str, Any]) -> None:
        """One step's line; `step` is its key, numbers go to TensorBoard too."""
        with disk_errors(self.path):
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
            if self._board is not None:
                for name, value in line.items():
                    if name != "step" and isinstance(value, int | float):
                        group = "eval" if name.startswith("eval_") else "train"
                        self._board.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, line["step"])
                self._board.flush()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _keep_lines_up_to(path: Path, step: int) -> None:
    """Rewrites the file, in one rename, without what a resumed run will write again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # torn by a kill: the step is written again
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(kept), encoding="utf-8")
    os.replace(beside, path)


class Progress:
    """The line that says where the run is: rewritten in place on a terminal, else printed every few seconds."""

    def __init__(self, steps: int, *, silent: bool = False):
        self._steps = steps
        self._silent = silent  # every process but the first
        self._console = Console(file=sys.stdout, highlight=False, quiet=silent)
        on_terminal = self._console.is_terminal and not silent
        self._live = Live(console=self._console, auto_refresh=False) if on_terminal else None
        self._last_plain = 0.0
        self._recent_seconds: float | None = None
        if self._live is not None:
            self._live.start()

    def say(self, message: str) -> None:
        """A line that stays."""
        self._console.print(message, markup=False, soft_wrap=True)

    def update(self, line: dict[str, Any]) -> None:
        """Shows a step's line of `metrics.jsonl`."""
        if self._silent:
            return
        seconds = line["step_seconds"]
        recent = seconds if self._recent_seconds is None else 0.8 * self._recent_seconds + 0.2 * seconds
        self._recent_seconds = recent
        left = duration((self._steps - line["step"]) * recent)
        mfu = _number(line["mfu_causal"], ".1%")
        text = (
            f"step {line['step']:>{len(str(self._steps))}}/{self._steps}  loss {_number(line['loss'], '.4f')}  "
            f"grad {_number(line['grad_norm'], '.2f')}  {line['tokens_per_second']:,.0f} tokens/s  MFU {mfu}  "
            f"{seconds:.2f} s/step  left {left}"
        )
        if "eval_loss" in line:
            text += f"  eval {_number(line['eval_loss'], '.4f')}"
        if self._live is not None:
            self._live.update(Text(text), refresh=True)
        last = line["step"] == self._steps
        now = time.monotonic()
        if self._live is None and (last or "eval_loss" in line or now - self._last_plain >= PLAIN_LINE_SECONDS):
            self._last_plain = now
            print(text, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

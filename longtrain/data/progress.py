"""How far a long pass over files has come: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


class TextProgress:
    """A context manager that shows bytes read of a total, with documents, tokens and rates."""

    def __init__(self, what: str, total_bytes: int, log: Callable[[str], None]):
        self._what, self._total, self._log = what, max(1, total_bytes), log
        self.bytes = self.documents = self.tokens = 0
        self._started = self._shown = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f} %  {task.fields[rate]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(what, total=self._total, rate="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        return max(1e-9, time.monotonic() - self._started)

    @property
    def detail(self) -> str:
        """Documents, tokens and rates so far, in words."""
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens, {self.bytes / 1e6:,.1f} MB in "
            f"{self.seconds:.1f} s ({self.tokens / self.seconds:,.0f} tokens/s)"
        )

    def show(self, size: int, documents: int, tokens: int) -> None:
        """Take what is done by now: bytes read, documents and tokens written."""
        self.bytes, self.documents, self.tokens = size, documents, tokens
        if self._bar is not None:
            rate = f"{self.tokens / self.seconds:,.0f} tokens/s"
            self._bar.update(self._task, completed=min(self.bytes, self._total), rate=rate)
        elif time.monotonic() - self._shown > _SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            self._log(f"{self._what}: {100 * min(1, self.bytes / self._total):.0f} %, {self.detail}")

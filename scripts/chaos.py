"""Kills a run again and again and holds what is left of it against one that nobody disturbed.

    python scripts/chaos.py [--seed N] [--steps N] [--kills N] [--never-resize] [--keep DIR] [key=value …]

The quickstart's model trains on shorter rows, so that this takes minutes. The kills fall on random moments: SIGKILL and
SIGTERM, on the way to the first step, between saves and inside one. After a first part on 4 devices the run goes on
on 1, 2 or 4, drawn anew at each start. Then, against the undisturbed run:

- every step is in metrics.jsonl once, with the same batch hash: the data came in the same order;
- until the devices first change, every loss is the same to the last bit, and the first one after is to 1e-5;
- the last loss is to 1e-3; with --never-resize it is bitwise the same, and so are the last weights.

Prints a line a kill and the verdict; exit code 1 when something does not hold.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEVICES = (1, 2, 4)
SETTINGS = (
    "sequence_length=512",
    "optimizer.decay=constant",
    "eval.every_steps=null",
    "checkpoint.every_steps=4",
    "checkpoint.keep=3",
    "metrics.tensorboard=false",
)
STARTUP_SECONDS = 10.0
SAVE_POLL_SECONDS = 0.0005
DEADLINE_SECONDS = 600


@dataclass(frozen=True)
class Kill:
    """What befalls a run: a signal, once `after` new steps are logged, at the moment that `where` says."""

    number: signal.Signals
    where: str  # start, step, save
    after: int
    delay: float


class Run:
    """A run of the quickstart's model in a folder, started as often as need be."""

    def __init__(self, folder: Path, name: str, steps: int, overrides: list[str]):
        self.dir = folder / "runs" / name
        self._folder, self._name = folder, name
        self._overrides = [*SETTINGS, f"run.steps={steps}", f"run.name={name}", *overrides]

    def start(self, devices: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "longtrain", "train", str(ROOT / "configs" / "quickstart.yaml")]
        environment = {name: text for name, text in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
        environment |= {
            "PYTHONPATH": str(ROOT),
            "JAX_COMPILATION_CACHE_DIR": str(self._folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        with (self._folder / f"{self._name}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, *self._overrides, f"mesh.context={devices}"],
                cwd=self._folder,
                env=environment,
                stdout=log,
                stderr=log,
            )

    def lines(self) -> list[dict]:
        """Whole lines of metrics.jsonl."""
        path = self.dir / "metrics.jsonl"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def last_step(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def said(self) -> str:
        """All that its processes have written so far."""
        path = self._folder / f"{self._name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def is_saving(self) -> bool:
        """Orbax writes under another name until all is there."""
        try:
            return any(not path.name.isdigit() for path in (self.dir / "checkpoints").iterdir())
        except FileNotFoundError:
            return False


def drawn(dice: random.Random, kills: int, steps: int) -> Iterator[Kill]:
    """The kills, so spaced that all fall within the run; the moments in turn, in another order each time round."""
    kinds: list[tuple[signal.Signals, str]] = []
    gap = max(steps // (kills + 2), 1)
    for _ in range(kills):
        if not kinds:
            kinds = [
                (number, where) for number in (signal.SIGKILL, signal.SIGTERM) for where in ("start", "step", "save")
            ]
            dice.shuffle(kinds)
        number, where = kinds.pop()
        yield Kill(number, where, dice.randint(max(gap // 2, 1), gap), dice.uniform(0, STARTUP_SECONDS))


def befall(run: Run, process: subprocess.Popen[bytes], kill: Kill, before: int) -> int:
    """Waits for the moment, kills, and returns the exit code. A run may have ended by itself just then."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    if kill.where == "start":
        time.sleep(kill.delay)
    else:
        while run.last_step() < before + kill.after and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        while kill.where == "save" and not run.is_saving() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(SAVE_POLL_SECONDS)
    if process.poll() is None:
        process.send_signal(kill.number)
    return process.wait(DEADLINE_SECONDS)


def relative(one: float, other: float) -> float:
    return abs(one - other) / abs(other)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument(
        "--never-resize", action="store_true", help="stay on 4 devices: then all must be bitwise the same"
    )
    parser.add_argument("--keep", type=Path, help="work in this folder, and leave it there")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            parser.error(f"--keep {folder}: is not empty")
        return chaos(folder.resolve(), arguments)


def chaos(folder: Path, arguments: argparse.Namespace) -> int:
    dice = random.Random(arguments.seed)
    undisturbed = Run(folder, "undisturbed", arguments.steps, arguments.overrides)
    if code := undisturbed.start(DEVICES[-1]).wait():
        print(f"the undisturbed run ended with exit code {code}: see {folder}/undisturbed.log")
        return 1
    last = undisturbed.lines()[-1]
    print(f"undisturbed: {last['step']} steps, last loss {last['loss']:.6f}")

    run = Run(folder, "disturbed", arguments.steps, arguments.overrides)
    changed: int | None = None  # the step that the first start on other devices went on from
    used, failures = set(), []
    kills = list(drawn(dice, arguments.kills, arguments.steps))
    print(f"{'kill':>4}  {'signal':7}  {'moment':6}  {'devices':>7}  {'from step':>9}  {'killed at':>9}  {'exit':>4}")
    for number, kill in enumerate([*kills, None], start=1):
        early = arguments.never_resize or number <= max(len(kills) // 3, 1)
        devices = DEVICES[-1] if early else dice.choice(DEVICES)
        before, said = run.last_step(), run.said()
        process = run.start(devices)
        code = process.wait() if kill is None else befall(run, process, kill, before)
        newest = run.last_step()
        resumed = re.search(r"resuming after step (\d+)", run.said().removeprefix(said))
        if changed is None and devices != DEVICES[-1] and resumed:
            changed = int(resumed[1])
        what = (kill.number.name, kill.where) if kill else ("-", "the end")
        print(f"{number:>4}  {what[0]:7}  {what[1]:6}  {devices:>7}  {before:>9}  {newest:>9}  {code:>4}", flush=True)
        legal = (0,) if kill is None else (-kill.number, 0) if kill.number == signal.SIGKILL else (75, 0, -kill.number)
        if code not in legal or (code == 0 and newest < arguments.steps):
            failures.append(f"start {number} ended with exit code {code}: see {folder}/disturbed.log")
            break
        used.add(devices)
    failures += compared(run, undisturbed, changed, arguments.steps)
    for failure in failures:
        print(f"FAILED: {failure}")
    if arguments.keep:
        print(f"all of it: {folder}")
    print("FAILED" if failures else f"held: {len(kills)} kills, on {', '.join(map(str, sorted(used)))} devices")
    return 1 if failures else 0


def compared(run: Run, undisturbed: Run, changed: int | None, steps: int) -> list[str]:
    """What does not hold."""
    lines, failures = run.lines(), []
    expected = {line["step"]: line for line in undisturbed.lines()}
    if [line["step"] for line in lines] != sorted(expected):
        return [f"steps {[line['step'] for line in lines][-5:]} end metrics.jsonl, or some are missing or twice"]
    if wrong := [line["step"] for line in lines if line["batch_hash"] != expected[line["step"]]["batch_hash"]]:
        failures.append(f"other rows in steps {wrong[:5]}")
    same_devices = [line for line in lines if changed is None or line["step"] <= changed]
    if wrong := [line["step"] for line in same_devices if line["loss"] != expected[line["step"]]["loss"]]:
        failures.append(f"another loss on the same devices in steps {wrong[:5]}")
    print(f"on the same devices: {len(same_devices)} losses bitwise the same")
    if changed is not None:
        after = lines[len(same_devices)]
        drift = relative(after["loss"], expected[after["step"]]["loss"])
        print(f"first loss on other devices: step {after['step']}, {drift:.1e} apart")
        if drift > 1e-5:
            failures.append(f"the first loss on other devices is {drift:.1e} apart")
    last, bound = lines[-1], 1e-3 if changed is not None else 0.0
    drift = relative(last["loss"], expected[last["step"]]["loss"])
    print(f"last loss: {last['loss']:.6f}, {drift:.1e} apart")
    if drift > bound:
        failures.append(f"the last loss is {drift:.1e} apart, more than {bound:g}")
    if changed is None:
        from longtrain import difference

        folders = [difference.named(str(steps), one.dir) for one in (run, undisturbed)]
        apart = [str(one) for one in difference.differences(*folders) if one.largest != 0]
        print(f"parameters that differ after the last step: {len(apart)}")
        failures += apart
    return failures


if __name__ == "__main__":
    sys.exit(main())

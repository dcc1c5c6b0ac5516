"""A training run: build, restore, then step, log, evaluate and save until the last step or a signal."""

import contextlib
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from typing import Any

import jax

from longtrain import profiling, runlock
from longtrain.accounting import Accounting, peak_flops
from longtrain.build import build
from longtrain.checkpoint import EVAL_LOSS, Checkpoints
from longtrain.compilations import Compilations
from longtrain.config import Config, to_yaml
from longtrain.data import inspect
from longtrain.data.everywhere import ensure_everywhere
from longtrain.data.loader import Batches
from longtrain.data.prepare import Prepared
from longtrain.data.rows import RowIndex
from longtrain.errors import NonFiniteError, Preempted
from longtrain.evaluate import Evaluator
from longtrain.metrics import Metrics, Progress, disk_errors
from longtrain.parallel import process
from longtrain.plan import backends
from longtrain.resume import Position, run_record, starting_point
from longtrain.state import State
from longtrain.stopping import StopRequest
from longtrain.watchdog import Watchdog


def train(config: Config) -> None:
    """Trains until `run.steps`; goes on from the run's checkpoints when it has some.

    Raises:
      ConfigError, DataError, CheckpointError: as `errors.py` says.
      ClusterError: the mesh's permutes lose data.
      DataError: also, once all is saved, when the data ends before `run.steps`.
      NonFiniteError: more than `guard.max_bad_steps` steps in a row were not finite.
      Preempted: a signal asked the run to stop, and it has saved.
    """
    stop = StopRequest()
    first_process = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop.listening())
        progress = Progress(config.run.steps, silent=not first_process)
        stack.callback(progress.close)
        say = progress.say

        built = build(config)
        devices = built.mesh.devices.flatten()
        sizes = " x ".join(f"{axis} {size}" for axis, size in built.mesh.shape.items())
        say(f"mesh: {sizes} on {devices.size} x {devices[0].device_kind}, {jax.process_count()} process(es)")
        for choice in built.choices:
            say(choice)
        process.wait_for_all("the self-test of permutes")
        built.check_permutes()
        prepared = ensure_everywhere(config, say)
        index = RowIndex.of(config, prepared, "train")
        say(
            f"an epoch: {index.documents:,} documents, {index.tokens_per_epoch:,} tokens, "
            f"{index.rows_per_epoch:,} rows of {config.sequence_length:,}, {index.padding_fraction:.2%} padding"
        )
        # Made before anything is restored or compiled: it refuses what cannot be evaluated.
        evaluate = Evaluator(built, prepared) if config.eval.every_steps is not None else None

        if first_process:
            stack.enter_context(runlock.held(config.run_dir, say))
        checkpoints = Checkpoints(config.run_dir, config.checkpoint, say)
        stack.callback(checkpoints.close)
        state, position = starting_point(built, prepared, index, checkpoints, say)
        if position.step >= config.run.steps:
            done = f"{position.step} of run.steps = {config.run.steps}"
            say(f"{config.run_dir}: the run is complete, {done}; raise it to go on")
            return
        if profiling.too_late(config, position.step):
            say(f"metrics.profile = {list(config.metrics.profile or ())}: those steps are done, nothing is traced")

        metrics = None
        if first_process:
            metrics = Metrics(config.run_dir, step=position.step, tensorboard=config.metrics.tensorboard)
            stack.callback(metrics.close)
            with disk_errors(config.run_dir):
                (config.run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")

        started = time.perf_counter()
        compilations = Compilations("train_step")
        train_step = built.train_step()
        backends.check(built, train_step, say)
        if evaluate is not None:
            evaluate.compile()
        say(f"compiled in {time.perf_counter() - started:.1f} s")

        batches = Batches(
            index,
            mesh=built.mesh,
            deal=built.how.deal,
            sequences=config.batch.sequences,
            accumulation=config.batch.accumulation,
            first_row=position.rows_taken,
            prefetch=config.data.prefetch,
            workers=config.data.workers,
        )
        stack.callback(batches.close)
        process.wait_for_all("the first step")
        peak, peak_source = peak_flops(built)
        say(f"MFU is against {peak_source}")
        accounting = Accounting(built, peak, position.tokens_seen)
        stop.started()
        watchdog = Watchdog(config.guard.step_timeout_seconds)
        stack.callback(watchdog.close)
        loop = _Loop(
            config,
            prepared,
            index,
            train_step,
            evaluate,
            batches,
            checkpoints,
            metrics,
            progress,
            accounting,
            compilations,
            stop,
            watchdog,
        )
        loop.run(state, position)
        say(farewell(config))


@dataclass
class _Flight:
    """A step that was dispatched and whose metrics have not been fetched."""

    step: int
    first_row: int
    sums: dict[str, jax.Array]
    data_wait: float


@dataclass
class _Loop:
    """The steps of one process. Metrics are fetched one step late, so that the devices always have work queued."""

    config: Config
    prepared: Prepared
    index: RowIndex
    train_step: jax.stages.Compiled
    evaluate: Evaluator | None
    batches: Batches
    checkpoints: Checkpoints
    metrics: Metrics | None
    progress: Progress
    accounting: Accounting
    compilations: Compilations
    stop: StopRequest
    watchdog: Watchdog
    _stall: float = 0.0

    def run(self, state: State, position: Position) -> None:
        config = self.config
        self.stop_agreed = False
        self._clock = time.perf_counter()
        flight: _Flight | None = None
        saved_step = position.step
        with profiling.traced(config) as trace:
            while position.step < config.run.steps and self._rows_left(position) and not self.stop_agreed:
                trace.before_step(position.step + 1)
                self.watchdog.watch(f"step {position.step + 1}", position.step + 1)
                waiting = time.perf_counter()
                batch = next(self.batches)
                waited = time.perf_counter() - waiting
                state, sums = self.train_step(state, batch, self.stop.votes(self.batches.mesh))
                position.step += 1
                previous, flight = flight, _Flight(position.step, position.rows_taken, sums, waited)
                position.rows_taken += config.batch.sequences
                if previous is not None:
                    self._log(self._landed(previous))
                trace.after_step(position.step, sums)
                evaluate = self._due(config.eval.every_steps, position.step)
                save = self._due(config.checkpoint.every_steps, position.step)
                if evaluate or save:
                    line = self._landed(flight)
                    flight = None
                    if evaluate and self.evaluate is not None:
                        self.watchdog.watch(f"the evaluation after step {position.step}", position.step)
                        line |= self.evaluate(state.parameters)
                    # The line is written before the state it belongs to: a checkpoint never lacks its own step's line.
                    self._log(line)
                    if save:
                        self._save(state, position, line.get(EVAL_LOSS))
                        saved_step = position.step
                    self._clock = time.perf_counter()  # evaluation and saving are no part of a step's time
            if flight is not None:
                self._log(self._landed(flight))
            if saved_step != position.step:
                self._save(state, position)
        self.watchdog.watch(f"the last save, after step {position.step}", position.step)
        self.checkpoints.wait()
        if self.stop_agreed and position.step < config.run.steps:
            raise Preempted(
                f"stopped by {self.stop.received or 'a signal to another process'} after step {position.step}, saved "
                f"in {self.checkpoints.folder}: run the same command again to go on"
            )
        if position.step < config.run.steps:
            self.index.check(position.rows_taken, config.batch.sequences)

    def _rows_left(self, position: Position) -> bool:
        return self.index.rows is None or position.rows_taken + self.config.batch.sequences <= self.index.rows

    def _due(self, every: int | None, step: int) -> bool:
        return every is not None and (step % every == 0 or step == self.config.run.steps)

    def _landed(self, flight: _Flight) -> dict[str, Any]:
        """The line of a step, once its metrics are here."""
        sums = jax.device_get(flight.sums)
        now = time.perf_counter()
        self.accounting.add(sums, seconds=now - self._clock, data_wait=flight.data_wait)
        self._clock = now
        self.stop_agreed |= bool(sums["stop_votes"])
        line = self.accounting.line(flight.step, sums, compilations=self.compilations.count)
        if bad_steps := int(sums["bad_steps"]):
            self._tell_bad_step(bad_steps, line, flight.first_row)
        elif sums["spike"]:
            deviations = self.config.guard.spike_deviations
            message = f"step {flight.step}: its gradient norm {line['grad_norm']:.4g} is a spike, nothing was applied"
            self.progress.say(f"{message} (guard.spike_deviations = {deviations})")
        if self.config.guard.spike_deviations is not None:
            line["spike_skipped"] = int(sums["spike"])
        return line

    def _tell_bad_step(self, bad_steps: int, line: dict[str, Any], first_row: int) -> None:
        loss, norm = (line[name] if line[name] is not None else "not finite" for name in ("loss", "grad_norm"))
        message = (
            f"step {line['step']}: the loss, a gradient or the update is not finite (loss {loss}, grad_norm {norm}); "
            f"nothing was applied ({bad_steps} in a row; guard.max_bad_steps = {self.config.guard.max_bad_steps}); "
            f"`longtrain data inspect CONFIG --step {line['step']}` shows its {self.config.batch.sequences} rows:\n"
            + inspect.named(self.index, first_row=first_row, sequences=self.config.batch.sequences)
        )
        if bad_steps > self.config.guard.max_bad_steps:
            self._write(line)
            raise NonFiniteError(message)
        self.progress.say(message)

    def _log(self, line: dict[str, Any]) -> None:
        step = line["step"]
        if step % self.config.metrics.log_every and step != self.config.run.steps and "eval_loss" not in line:
            return
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        self.accounting.written()
        line["checkpoint_stall_seconds"], self._stall = self._stall, 0.0
        if self.metrics is not None:
            self.metrics.write(line)
        self.progress.update(line)

    def _save(self, state: State, position: Position, eval_loss: float | None = None) -> None:
        self.watchdog.watch(f"the save of step {position.step}", position.step)
        position.tokens_seen = self.accounting.tokens_seen
        record = run_record(self.config, position, self.prepared, self.index)
        began = time.perf_counter()
        self.checkpoints.save(position.step, state, record, eval_loss)
        # Of the line after: this step's own is written before its checkpoint can be complete.
        self._stall += time.perf_counter() - began


def farewell(config: Config) -> str:
    """Where a finished run's things are, and what to do with them."""
    run = shlex.quote(str(config.run_dir))
    board = ", tensorboard/" if config.metrics.tensorboard else ""
    # As the reader can type it: the quickstart's environment, for one, is not on the PATH.
    longtrain = "longtrain" if shutil.which("longtrain") else f"{shlex.quote(sys.executable)} -m longtrain"
    return "\n".join(
        [
            f"done: {config.run.steps} steps. In {config.run_dir}/: metrics.jsonl, checkpoints/, config.yaml{board}",
            *([f"  watch:    tensorboard --logdir {run}/tensorboard   (pip install tensorboard)"] if board else []),
            f"  go on:    {longtrain} train {run}/config.yaml run.steps={2 * config.run.steps}",
            f"  evaluate: {longtrain} eval {run}/config.yaml",
            f"  sample:   {longtrain} generate {run}/config.yaml --prompt 'def main():'",
        ]
    )

"""Checkpoints through Orbax: written while training goes on, found again by the same command.

A checkpoint holds three items: `parameters`, `optimizer` (with the step counters) and `run`, a JSON object with the
data position, the fingerprints of data plan and tokenizer, the resolved config and the code's version. Weights are an
item of their own so that evaluation, generation, export and continued pre-training read nothing else.
"""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from longtrain import digests
from longtrain.config import CheckpointConfig
from longtrain.errors import CheckpointError, LongtrainError
from longtrain.guard import NormHistory
from longtrain.model import Params
from longtrain.parallel import process
from longtrain.state import State

T = TypeVar("T")
Say = Callable[[str], None]
RunRecord = dict[str, Any]
"""The item `run`, see `resume.run_record`."""

FOLDER = "checkpoints"
EVAL_LOSS = "eval_loss"


class Checkpoints:
    """The checkpoints of one run. Close it: that waits for a save still being written.

    Args:
      run_dir: the run's folder.
      config: which are kept, and whether files are compared with their digests before a restore.
      say: takes a line for people.
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig, say: Say):
        self.folder = run_dir.resolve() / FOLDER
        self._verify, self._say = config.verify, say
        silence_orbax()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_kept(config),
            best_fn=_goodness if config.keep_best else None,  # without one Orbax writes no metrics
            enable_async_checkpointing=True,
            create=True,
            cleanup_tmp_directories=True,  # what a run that was killed while saving left behind
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # Orbax would find out with the first save
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.folder}: cannot be opened for checkpoints: {_short(error)}") from error
        self._digester = digests.Digester(self.folder, jax.process_index(), jax.process_count())

    def steps(self) -> list[int]:
        """The steps that are complete, oldest first."""
        return sorted(self._manager.all_steps())

    def newest_record(self) -> RunRecord | None:
        """The run object of the newest step whose own can be read; None when there is none."""
        for step in reversed(self.steps()):
            run, _ = _in_every_process(functools.partial(_run_object, self._manager, step))
            if run is not None:
                return run
        return None

    def save(self, step: int, state: State, run: RunRecord, eval_loss: float | None = None) -> None:
        """Starts saving; returns once the state is copied off the devices, so that the next step may overwrite it.

        What is not to be kept any longer is removed after this one is complete, and not if it fails.

        Args:
          eval_loss: this step's, if it was evaluated and finite: it decides which are the best.

        Raises:
          CheckpointError: when this save cannot start, or the one before it failed.
        """
        parameters, optimizer = state.parameters, _without_parameters(state)
        items = ocp.args.Composite(
            parameters=ocp.args.StandardSave(parameters),
            optimizer=ocp.args.StandardSave(optimizer),
            run=ocp.args.JsonSave(run),
        )
        try:
            metrics = None if eval_loss is None else {EVAL_LOSS: eval_loss}
            saved = self._manager.save(step, args=items, metrics=metrics, force=True)
            self._digester.after(step)
        except Exception as error:  # Orbax lets through whatever the file system or tensorstore raised
            raise CheckpointError(f"{self.folder}/{step}: cannot be saved: {_short(error)}") from error
        if not saved:
            newest = self.steps()[-1:]
            raise CheckpointError(f"{self.folder}/{step}: Orbax declined to save this step (newest: {newest})")

    def restore(
        self, abstract: State, wanted: int | None, accept: Callable[[RunRecord], None]
    ) -> tuple[State, RunRecord] | None:
        """The state and run object of step `wanted`, or of the newest step that can be read; None when there is none.

        Arrays arrive as `abstract` shards them, whatever mesh wrote them. A newest checkpoint that cannot be read is
        told of, set aside under another name and passed over for the one before it; so are, when `wanted` is given,
        the steps after it, whose numbers the run will reach again.

        Args:
          accept: raises where the run object says that the checkpoint, though sound, does not fit this run.

        Raises:
          CheckpointError: when `wanted` is not there or cannot be read, or no step can be read although some exist.
        """
        steps = self.steps()
        if wanted is not None and wanted not in steps:
            raise CheckpointError(f"{self.folder}: no complete checkpoint of step {wanted}; there are: {steps}")
        for step in reversed(steps) if wanted is None else [wanted]:
            found, reason = self._read(step, abstract, accept)
            if found is not None:
                for later in steps[steps.index(step) + 1 :]:
                    self._set_aside(later, f"{'damaged' if wanted is None else 'superseded'}-{later}")
                return found
            if wanted is not None:
                raise CheckpointError(f"{self.folder}/{step}: cannot be read: {reason}")
            self._say(f"checkpoint {self.folder}/{step} cannot be read and is passed over: {reason}")
        if steps:  # they stay where they are, so that the same command does not begin anew
            raise CheckpointError(f"{self.folder}: none of the checkpoints {steps} can be read")
        return None

    def _read(
        self, step: int, abstract: State, accept: Callable[[RunRecord], None]
    ) -> tuple[tuple[State, RunRecord] | None, str]:
        """What the step holds, or None and the reason why some process cannot read it."""

        if self._verify:
            verified, reason = _verified(self.folder / str(step), ("parameters", "optimizer", "run"))
            if verified is None:
                return None, reason
            self._say(f"checkpoint {self.folder}/{step}: {verified}")

        def read() -> tuple[State, RunRecord]:
            run = _run_object(self._manager, step)
            accept(run)
            there = _as_saved(abstract, run)
            items = ocp.args.Composite(
                parameters=ocp.args.StandardRestore(there.parameters),
                optimizer=ocp.args.StandardRestore(_without_parameters(there)),
            )
            arrays = self._manager.restore(step, args=items)
            state = State(parameters=arrays["parameters"], **arrays["optimizer"])
            return (state if there is abstract else _as_wanted(state, abstract)), run

        return _in_every_process(read)

    def _set_aside(self, step: int, name: str) -> None:
        """Renames a step, so that its number can be saved again and nobody takes it for the run's."""
        if jax.process_index() == 0:
            target, copies = self.folder / name, 1
            while target.exists():
                copies += 1
                target = self.folder / f"{name}-{copies}"
            os.replace(self.folder / str(step), target)
            self._say(f"checkpoint {self.folder}/{step} is set aside as {target.name}")
        process.wait_for_all(f"set aside {name}")
        self._manager.reload()

    def wait(self) -> None:
        """Waits for the save being written.

        Raises:
          CheckpointError: when it failed.
        """
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            self._digester.wait()
        except Exception as error:
            raise CheckpointError(f"{self.folder}: a checkpoint could not be written: {_short(error)}") from error

    def close(self) -> None:
        """Raises nothing: a run that ends well has waited for its saves, and one that fails shall say why itself."""
        try:
            self._manager.close()
            self._digester.close()
        except Exception as error:
            self._say(f"checkpoints in {self.folder} could not be closed: {_short(error)}")


def _without_parameters(state: State) -> dict[str, Any]:
    """As item `optimizer`; the history of norms is only there in a run that keeps one."""
    others = {"step": state.step, "bad_steps": state.bad_steps, "optimizer": state.optimizer}
    return others if state.norms is None else others | {"norms": state.norms}


def _as_saved(abstract: State, run: RunRecord) -> State:
    """The abstract state with a history of norms if the checkpoint's run kept one: that may change between runs."""
    has = run["config"]["guard"].get("spike_deviations") is not None
    if has == (abstract.norms is not None):
        return abstract
    everywhere = abstract.step.sharding
    shapes = jax.eval_shape(NormHistory.empty)
    norms = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), shapes)
    return dataclasses.replace(abstract, norms=norms if has else None)


def _as_wanted(state: State, abstract: State) -> State:
    """The restored state without the history of norms that nobody asks for any more, or with a new one."""
    if abstract.norms is None:
        return dataclasses.replace(state, norms=None)
    cuts = jax.tree.map(lambda leaf: leaf.sharding, abstract.norms)
    return dataclasses.replace(state, norms=jax.jit(NormHistory.empty, out_shardings=cuts)())


def _kept(config: CheckpointConfig) -> policies.PreservationPolicy:
    kept: list[policies.PreservationPolicy] = [policies.LatestN(config.keep)]
    if config.keep_every is not None:
        kept.append(policies.EveryNSteps(config.keep_every))
    if config.keep_best:
        best = policies.BestN(get_metric_fn=_goodness, n=config.keep_best, keep_checkpoints_without_metrics=False)
        kept.append(best)
    return policies.AnyPreservationPolicy(kept)


def _goodness(metrics: dict[str, float]) -> float:
    return -metrics[EVAL_LOSS]


def silence_orbax() -> None:
    """It tells of every save and restore, and of every error at length before raising it; we say what matters."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)


def _run_object(manager: ocp.CheckpointManager, step: int) -> RunRecord:
    return manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]


def _verified(checkpoint: Path, items: tuple[str, ...]) -> tuple[str | None, str]:
    """What was verified in words, or None and why the checkpoint is not what was written."""
    share = functools.partial(digests.verify, checkpoint, items, jax.process_index(), jax.process_count())
    return _in_every_process(share)


def _in_every_process(read: Callable[[], T]) -> tuple[T | None, str]:
    """What `read` gives, or None and the reason why in some process it cannot: all go the same way."""
    found, reason = None, "another process cannot read its part"
    try:
        found = read()
    except LongtrainError:
        raise
    except Exception as error:  # anything at all: a damaged file may fail anywhere below
        reason = _short(error)
    if jax.process_count() > 1 and not multihost_utils.process_allgather(np.array(found is not None)).all():
        found = None
    return found, reason


def _short(error: Exception) -> str:
    """The first line: Orbax and tensorstore append tracebacks and whole trees."""
    first, *rest = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[:900]}{' ...' if rest or len(first) > 900 else ''}"


def folder_of(run_dir: Path) -> Path:
    """The folder of a run's checkpoints.

    Raises:
      CheckpointError: when there is none.
    """
    folder = run_dir.resolve() / FOLDER
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; is {run_dir} the folder of a run?")
    return folder


def restore_parameters(
    run_dir: Path,
    abstract: Params,
    *,
    step: int | None,
    verify: bool,
    accept: Callable[[RunRecord], None],
    say: Say,
) -> tuple[Params, RunRecord]:
    """Only the weights of a run's step (None: its newest), sharded as `abstract` says, and its run object.

    Args:
      verify: whether files are compared with their digests first.
      accept: raises where the run object says that the checkpoint, though sound, does not fit.

    Raises:
      CheckpointError: when there is no such checkpoint or it cannot be read.
    """
    silence_orbax()
    folder = folder_of(run_dir)
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        step = _step_of(manager, folder, step)
        if verify:
            verified, reason = _verified(folder / str(step), ("parameters", "run"))
            if verified is None:
                raise CheckpointError(f"{folder}/{step}: cannot be read: {reason}")
            say(f"checkpoint {folder}/{step}: {verified}")
        try:
            run = _run_object(manager, step)
            accept(run)
            items = ocp.args.Composite(parameters=ocp.args.StandardRestore(abstract))
            parameters = manager.restore(step, args=items)["parameters"]
        except LongtrainError:
            raise
        except Exception as error:
            raise CheckpointError(f"{folder}/{step}: cannot be read: {_short(error)}") from error
    say(f"weights of step {step} from {folder}")
    return parameters, run


def _step_of(manager: ocp.CheckpointManager, folder: Path, step: int | None) -> int:
    """The step asked for, or the newest. Raises CheckpointError when it is not there."""
    steps = sorted(manager.all_steps())
    if not steps or (step is not None and step not in steps):
        asked = f"of step {step}" if step is not None else "at all"
        raise CheckpointError(f"{folder}: no complete checkpoint {asked}; there are: {steps}")
    return steps[-1] if step is None else step


def verified_weights(run_dir: Path, step: int | None, say: Say) -> tuple[Path, RunRecord]:
    """The folder of the weights of a run's step (None: its newest), compared with their digests, and its run object.

    Raises:
      CheckpointError: when there is no such checkpoint or it is not what was written.
    """
    silence_orbax()
    folder = folder_of(run_dir)
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        step = _step_of(manager, folder, step)
        verified, reason = _verified(folder / str(step), ("parameters", "run"))
        if verified is None:
            raise CheckpointError(f"{folder}/{step}: cannot be read: {reason}")
        say(f"checkpoint {folder}/{step}: {verified}")
        record, reason = _in_every_process(functools.partial(_run_object, manager, step))
        if record is None:
            raise CheckpointError(f"{folder}/{step}: cannot be read: {reason}")
    return folder / str(step) / "parameters", record

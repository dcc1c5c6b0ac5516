"""Checkpoints through Orbax: written while training goes on, found again by the same command.

A checkpoint holds three items: `parameters`, `optimizer` (with the step counters) and `run`, a JSON object with the data
position, the data plan's fingerprint, the resolved config and the code's version. Weights are an item of their own so that
evaluation, generation, export and continued pre-training read nothing else.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from longtrain.errors import CheckpointError
from longtrain.model import Params
from longtrain.state import State

Say = Callable[[str], None]

FOLDER = "checkpoints"
DAMAGED_PREFIX = "damaged-"


class Checkpoints:
    """The checkpoints of one run. Close it: that waits for a save still being written.

    Args:
      run_dir: the run's folder.
      keep: how many of the newest to keep.
      say: takes a line for people.
    """

    def __init__(self, run_dir: Path, *, keep: int, say: Say):
        self.folder = run_dir.resolve() / FOLDER
        self._say = say
        # Orbax tells of every save and restore at INFO and WARNING; what matters is said here instead.
        logging.getLogger("absl").setLevel(logging.ERROR)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True, create=True)
        try:
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.folder}: cannot be opened for checkpoints: {error}") from error

    def steps(self) -> list[int]:
        """The steps that are complete, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: State, run: dict[str, Any]) -> None:
        """Starts saving; returns once the state is copied off the devices, so that the next step may overwrite it.

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
            saved = self._manager.save(step, args=items, force=True)
        except Exception as error:  # Orbax lets through whatever the file system or tensorstore raised
            raise CheckpointError(f"{self.folder}/{step}: cannot be saved: {error}") from error
        if not saved:
            raise CheckpointError(f"{self.folder}/{step}: Orbax declined to save this step (newest: {self.steps()[-1:]})")

    def restore(self, abstract: State, wanted: int | None = None) -> tuple[State, dict[str, Any]] | None:
        """The state and run object of step `wanted`, or of the newest step that can be read; None when there is none.

        Arrays arrive as `abstract` shards them, whatever mesh wrote them. A newest checkpoint that cannot be read is told of,
        set aside under another name and passed over for the one before it.

        Raises:
          CheckpointError: when `wanted` is not there or cannot be read, or no step can be read although some exist.
        """
        steps = self.steps()
        if wanted is not None:
            if wanted not in steps:
                raise CheckpointError(f"{self.folder}: no complete checkpoint of step {wanted}; there are: {steps}")
            try:
                return self._read(wanted, abstract)
            except Exception as error:
                raise CheckpointError(f"{self.folder}/{wanted}: cannot be read: {error}") from error
        for step in reversed(steps):
            try:
                return self._read(step, abstract)
            except Exception as error:  # anything at all: a damaged file may fail anywhere below
                self._say(f"checkpoint {self.folder}/{step} cannot be read and is passed over: {error}")
                self._set_aside(step)
        if steps:
            raise CheckpointError(f"{self.folder}: none of the checkpoints {steps} can be read")
        return None

    def _read(self, step: int, abstract: State) -> tuple[State, dict[str, Any]]:
        items = ocp.args.Composite(
            parameters=ocp.args.StandardRestore(abstract.parameters),
            optimizer=ocp.args.StandardRestore(_without_parameters(abstract)),
            run=ocp.args.JsonRestore(),
        )
        found = self._manager.restore(step, args=items)
        state = State(parameters=found["parameters"], **found["optimizer"])
        return state, found["run"]

    def _set_aside(self, step: int) -> None:
        """Renames a damaged step, so that its number can be saved again and nobody takes it for good."""
        if jax.process_index() == 0:
            os.replace(self.folder / str(step), self.folder / f"{DAMAGED_PREFIX}{step}")
        self._manager.reload()

    def wait(self) -> None:
        """Waits for the save being written.

        Raises:
          CheckpointError: when it failed.
        """
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise CheckpointError(f"{self.folder}: a checkpoint could not be written: {error}") from error

    def close(self) -> None:
        self._manager.close()


def _without_parameters(state: State) -> dict[str, Any]:
    return {"step": state.step, "bad_steps": state.bad_steps, "optimizer": state.optimizer}


def restore_parameters(
    run_dir: Path, abstract: Params, *, step: int | None, say: Say
) -> tuple[Params, int, dict[str, Any]]:
    """Only the weights of a run's step (None: its newest), sharded as `abstract` says; the step; the run object.

    Raises:
      CheckpointError: when there is no such checkpoint or it cannot be read.
    """
    folder = run_dir.resolve() / FOLDER
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; is {run_dir} the folder of a run?")
    with ocp.CheckpointManager(folder) as manager:
        steps = sorted(manager.all_steps())
        if not steps or (step is not None and step not in steps):
            raise CheckpointError(f"{folder}: no complete checkpoint of {step or 'any'} step; there are: {steps}")
        step = steps[-1] if step is None else step
        items = ocp.args.Composite(parameters=ocp.args.StandardRestore(abstract), run=ocp.args.JsonRestore())
        try:
            found = manager.restore(step, args=items)
        except Exception as error:
            raise CheckpointError(f"{folder}/{step}: cannot be read: {error}") from error
    say(f"weights of step {step} from {folder}")
    return found["parameters"], step, found["run"]

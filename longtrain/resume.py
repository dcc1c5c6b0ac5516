"""Where a run starts from: its own checkpoint, another run's weights, or the seed."""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import longtrain
from longtrain.build import Build
from longtrain.checkpoint import Checkpoints, RunRecord, Say, restore_parameters
from longtrain.config import Config
from longtrain.config.reading import leaves
from longtrain.data.rows import RowIndex
from longtrain.errors import ConfigError, Problem
from longtrain.model import Params
from longtrain.state import State

SIZES = {
    f"model.{name}"
    for name in (
        *("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"),
        "tie_embeddings",
    )
}
"""What decides which weights there are, and their shapes."""

FREE_IN_MODEL = {"model.preset", "model.compute_dtype"}
"""What of the model a run may change on its way: the first is only a name for the others."""


@dataclass
class Position:
    """Where a run is, beyond its state: all that a checkpoint must hold to go on at the next row."""

    step: int = 0
    rows_taken: int = 0
    tokens_seen: int = 0


def run_record(config: Config, position: Position, index: RowIndex) -> RunRecord:
    """What a checkpoint keeps beside the arrays."""
    return {
        "position": dataclasses.asdict(position),
        "data_plan": index.fingerprint,
        "config": config.model_dump(mode="json"),
        "longtrain": longtrain.__version__,
    }


def starting_point(build: Build, index: RowIndex, checkpoints: Checkpoints, say: Say) -> tuple[State, Position]:
    """The state and position that the config's `checkpoint` section asks for.

    Raises:
      CheckpointError: when a checkpoint asked for is not there or cannot be read.
      ConfigError: when going on would leave a run's checkpoints behind, change its model or the order of its data.
    """
    config = build.config
    wanted = config.checkpoint.restore
    if wanted == "none":
        if steps := checkpoints.steps():
            message = f"{checkpoints.folder} holds steps {steps}; legal: latest, one of these, or another run.name"
            raise ConfigError([Problem("checkpoint.restore", wanted, message)])
    else:
        accept = functools.partial(_check_same_run, config, index)
        found = checkpoints.restore(build.state, None if wanted == "latest" else wanted, accept)
        if found is not None:
            state, record = found
            position = Position(**record["position"])
            say(f"resuming after step {position.step}, at row {position.rows_taken:,}, from {checkpoints.folder}")
            if changed := _changes(record, config):
                say("changed since that checkpoint: " + ", ".join(f"{key} {old} -> {new}" for key, old, new in changed))
            return state, position
    state = build.initial_state()
    if config.checkpoint.init_from is not None:
        parameters, _ = load_weights(build, Path(config.checkpoint.init_from), step=None, say=say)
        state = dataclasses.replace(state, parameters=parameters)
    return state, Position()


def load_weights(build: Build, run_dir: Path, *, step: int | None, say: Say) -> tuple[Params, int]:
    """Only the weights of a run's step (None: its newest), sharded over the mesh, and the step.

    Raises:
      CheckpointError: when there is no such checkpoint or it cannot be read.
      ConfigError: when its model has other sizes than the config's.
    """

    def accept(record: RunRecord) -> None:
        _refuse([change for change in _changes(record, build.config) if change[0] in SIZES])

    return restore_parameters(run_dir, build.state.parameters, step=step, accept=accept, say=say)


def _changes(record: RunRecord, config: Config) -> list[tuple[str, Any, Any]]:
    """(key, value in the checkpoint, value now) of every key that both know and that differs."""
    saved, now = dict(leaves(record["config"])), dict(leaves(config.model_dump(mode="json")))
    return [(key, saved[key], now[key]) for key in now if key in saved and saved[key] != now[key]]


def _check_same_run(config: Config, index: RowIndex, record: RunRecord) -> None:
    """Refuses a checkpoint of another model, optimizer or data plan; mesh, length, rates and the like may change."""
    fixed = [
        change
        for change in _changes(record, config)
        if change[0] == "optimizer.name" or change[0].startswith("model.") and change[0] not in FREE_IN_MODEL
    ]
    _refuse(fixed)
    if record["data_plan"] != index.fingerprint:
        message = (
            f"the checkpoint was made with data plan {record['data_plan'][:16]}: sources, tokenizer, packing, weights, "
            "sequence_length, run.seed or data.eval_fraction are others here, and going on would repeat or skip "
            "documents; legal: the same data, or another run.name with checkpoint.init_from set to this run's folder"
        )
        raise ConfigError([Problem("data", f"plan {index.fingerprint[:16]}", message)])


def _refuse(changes: list[tuple[str, Any, Any]]) -> None:
    if changes:
        raise ConfigError([Problem(key, new, f"the checkpoint was made with {old!r}") for key, old, new in changes])

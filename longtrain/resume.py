"""Where a run starts from: its own checkpoint, another run's weights, or the seed."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import longtrain
from longtrain.build import Build
from longtrain.checkpoint import Checkpoints, Say, restore_parameters
from longtrain.config import Config
from longtrain.data.rows import RowIndex
from longtrain.errors import ConfigError, Problem
from longtrain.state import State


@dataclass
class Position:
    """Where a run is, beyond its state: all that a checkpoint must hold to go on at the next row."""

    step: int = 0
    rows_taken: int = 0
    tokens_seen: int = 0


def run_record(config: Config, position: Position, index: RowIndex) -> dict[str, Any]:
    """What a checkpoint keeps beside the arrays."""
    return {
        "position": asdict(position),
        "data_plan": index.fingerprint,
        "config": config.model_dump(mode="json"),
        "longtrain": longtrain.__version__,
    }


def starting_point(build: Build, index: RowIndex, checkpoints: Checkpoints, say: Say) -> tuple[State, Position]:
    """The state and position that the config's `checkpoint` section asks for.

    Raises:
      CheckpointError: when a checkpoint asked for is not there or cannot be read.
      ConfigError: when going on would leave a run's checkpoints behind or change the order of its data.
    """
    config = build.config
    wanted = config.checkpoint.restore
    if wanted == "none":
        if steps := checkpoints.steps():
            message = f"{checkpoints.folder} holds steps {steps}; legal: latest, one of these steps, or another run.name"
            raise ConfigError([Problem("checkpoint.restore", wanted, message)])
    else:
        found = checkpoints.restore(build.state, None if wanted == "latest" else wanted)
        if found is not None:
            state, record = found
            _check_data_plan(record["data_plan"], index)
            position = Position(**record["position"])
            say(f"resuming after step {position.step}, at row {position.rows_taken:,}, from {checkpoints.folder}")
            return state, position
    state = build.initial_state()
    if config.checkpoint.init_from is not None:
        abstract = build.state.parameters
        parameters, _, _ = restore_parameters(Path(config.checkpoint.init_from), abstract, step=None, say=say)
        state = State(state.step, state.bad_steps, parameters, state.optimizer)
    return state, Position()


def _check_data_plan(saved: str, index: RowIndex) -> None:
    if saved == index.fingerprint:
        return
    message = (
        f"the checkpoint was made with data plan {saved}: sources, tokenizer, packing, weights, sequence_length, run.seed or "
        "data.eval_fraction are others here, and going on would repeat or skip documents; legal: the same data, or "
        "another run.name with checkpoint.init_from set to this run's folder"
    )
    raise ConfigError([Problem("data", f"plan {index.fingerprint}", message)])

"""Where a run starts from: its own checkpoint, another run's weights, or the seed."""

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import longtrain
from longtrain import hf
from longtrain.build import Build
from longtrain.checkpoint import Checkpoints, RunRecord, Say, restore_parameters
from longtrain.config import Config, huggingface
from longtrain.data import tokenizers
from longtrain.data.prepare import Prepared
from longtrain.data.rows import RowIndex
from longtrain.errors import CheckpointError, ConfigError, Problem
from longtrain.model import Params
from longtrain.state import State

Change = tuple[str, Any, Any]
"""A config's dotted key, its value in the checkpoint and its value now."""

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


def run_record(config: Config, position: Position, prepared: Prepared, index: RowIndex) -> RunRecord:
    """What a checkpoint keeps beside the arrays."""
    return {
        "position": dataclasses.asdict(position),
        "data_plan": index.fingerprint,
        "tokenizer": prepared.manifest["tokenizer"]["fingerprint"],
        "prepared": str(prepared.folder),
        "config": config.model_dump(mode="json"),
        "longtrain": longtrain.__version__,
    }


def starting_point(
    build: Build, prepared: Prepared, index: RowIndex, checkpoints: Checkpoints, say: Say
) -> tuple[State, Position]:
    """The state and position that the config's `checkpoint` section asks for.

    Raises:
      CheckpointError: when a checkpoint asked for is not there or cannot be read.
      ConfigError: when going on would leave a run's checkpoints behind, change its model or the order of its data, or
        when weights of another model or tokenizer are to start it.
    """
    config = build.config
    wanted = config.checkpoint.restore
    if wanted == "none":
        if steps := checkpoints.steps():
            message = f"{checkpoints.folder} holds steps {steps}; legal: latest, one of these, or another run.name"
            raise ConfigError([Problem("checkpoint.restore", wanted, message)])
    else:
        if wanted != "latest" and _went_back_before(checkpoints, wanted):
            say(
                f"checkpoint.restore = {wanted} was done before: going on from the newest step, which came of it "
                "(move the later ones away to go back once more)"
            )
            wanted = "latest"
        accept = functools.partial(_check_same_run, config, prepared, index)
        found = checkpoints.restore(build.state, None if wanted == "latest" else wanted, accept)
        if found is not None:
            state, record = found
            position = Position(**record["position"])
            say(f"resuming after step {position.step}, at row {position.rows_taken:,}, from {checkpoints.folder}")
            if changed := _changes(record, config):
                say(_told(changed))
            if record["data_plan"] != index.fingerprint:  # and data.on_change has it so
                if config.data.on_change == "restart":
                    position.rows_taken = 0
                say(
                    f"data.on_change = {config.data.on_change}: the data plan is not that checkpoint's; from here on "
                    f"the data has a new order, taken from row {position.rows_taken:,}, and in this epoch documents "
                    "may be seen again or not at all"
                )
            return state, position
    state = build.initial_state()
    if config.checkpoint.init_from is not None:
        folder = huggingface.folder_of(config.checkpoint.init_from)
        if folder is not None:
            parameters = load_hf_weights(build, prepared, folder, say)
        else:
            parameters, _ = load_weights(build, prepared, Path(config.checkpoint.init_from), step=None, say=say)
        state = dataclasses.replace(state, parameters=parameters)
    return state, Position()


def load_weights(
    build: Build, prepared: Prepared, run_dir: Path, *, step: int | None, say: Say
) -> tuple[Params, RunRecord]:
    """Only the weights of a run's step (None: its newest), sharded over the mesh, and its run object.

    What else of the model is another here (rope, say, for a longer context) is told of.

    Raises:
      CheckpointError: when there is no such checkpoint or it cannot be read.
      ConfigError: when its model has other sizes than the config's, or it was trained with another tokenizer.
    """

    def accept(record: RunRecord) -> None:
        changed = [change for change in _changes(record, build.config) if change[0].startswith("model.")]
        _refuse([change for change in changed if change[0] in SIZES])
        _check_tokenizer(build.config, prepared, record)
        if changed:
            say(_told(changed))

    verify = build.config.checkpoint.verify
    return restore_parameters(run_dir, build.state.parameters, step=step, verify=verify, accept=accept, say=say)


def load_hf_weights(build: Build, prepared: Prepared, folder: Path, say: Say) -> Params:
    """The weights of a Hugging Face folder, read as the mesh shards them.

    Raises:
      CheckpointError: when the folder is not whole, or holds another model than the config's.
      ConfigError: when its tokenizer.json is not the config's tokenizer.
    """
    try:
        theirs = huggingface.model_keys(folder)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    weights = hf.Weights(folder, hf.shapes_of(build.state.parameters), theirs["vocab_size"])
    _check_hf_tokenizer(build.config, prepared, folder, say)
    rope = build.config.model.rope.model_dump(mode="json")
    if changed := list(_differences({"rope": theirs["rope"]}, {"rope": rope}, "model")):
        say(_told(changed))
    parameters = weights.parameters(build.state.parameters)
    say(f"weights of {folder}, {', '.join(sorted(weights.dtypes))} there")
    return parameters


def _check_hf_tokenizer(config: Config, prepared: Prepared, folder: Path, say: Say) -> None:
    ours = prepared.manifest["tokenizer"]
    file = tokenizers.SENTENCEPIECE_FILE if ours["kind"] == "sentencepiece" else tokenizers.HUGGING_FACE_FILE
    if not (folder / file).is_file():
        say(f"NOT COMPARED: the tokenizer of {folder}, which has no {file}, with data.tokenizer, a {ours['kind']}")
        return
    if tokenizers.load(folder / file).fingerprint != ours["fingerprint"]:
        message = f"is not the one that the weights were trained with; legal: {folder / file}"
        raise ConfigError([Problem("data.tokenizer", config.model_dump()["data"]["tokenizer"], message)])


def _went_back_before(checkpoints: Checkpoints, wanted: int) -> bool:
    """Whether the newest step came of going back to `wanted`, so that the same command means to go on."""
    newest = checkpoints.newest_record()
    return (
        newest is not None
        and newest["config"]["checkpoint"]["restore"] == wanted
        and newest["position"]["step"] > wanted
    )


def _changes(record: RunRecord, config: Config) -> list[Change]:
    """All that differs between the checkpoint's config and this one."""
    return list(_differences(record["config"], config.model_dump(mode="json"), ""))


def _differences(old: Any, new: Any, key: str) -> Iterator[Change]:
    """Value by value where both are mappings, or lists of as many; anything else is compared as a whole.

    A name that only one of two mappings has is one that the other's version of longtrain did not know, and is passed
    over: within a version they have the same names, or another `type`, which differs itself.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(name, old[name], new[name]) for name in new if name in old]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = list(zip(range(len(new)), old, new, strict=True))
    else:
        if old != new:
            yield key, old, new
        return
    for name, before, now in pairs:
        yield from _differences(before, now, f"{key}.{name}" if key else name)


def _told(changes: list[Change]) -> str:
    return "changed since that checkpoint: " + ", ".join(f"{key} {old} -> {new}" for key, old, new in changes)


def _check_same_run(config: Config, prepared: Prepared, index: RowIndex, record: RunRecord) -> None:
    """Refuses a checkpoint of another model or optimizer, or of another data plan unless `data.on_change` allows one;
    mesh, length, rates and the like may change."""
    fixed = [
        change
        for change in _changes(record, config)
        if change[0] == "optimizer.name" or change[0].startswith("model.") and change[0] not in FREE_IN_MODEL
    ]
    _refuse(fixed)
    if record["data_plan"] != index.fingerprint:
        _check_tokenizer(config, prepared, record)
        if config.data.on_change != "refuse":
            return
        message = (
            f"the checkpoint was made with data plan {record['data_plan'][:16]}: sources, tokenizer, packing, weights, "
            "sequence_length, run.seed or data.eval_fraction are others here, and going on would repeat or skip "
            "documents; legal: the same data, data.on_change=restart or continue, or another run.name with "
            "checkpoint.init_from set to this run's folder"
        )
        raise ConfigError([Problem("data", f"plan {index.fingerprint[:16]}", message)])


def _check_tokenizer(config: Config, prepared: Prepared, record: RunRecord) -> None:
    """Refuses weights that were trained on the ids of another tokenizer: to them, these would be noise."""
    old, new = record["tokenizer"], prepared.manifest["tokenizer"]["fingerprint"]
    if old is None:  # weights converted from a folder without one
        return
    if old != new:
        file = tokenizers.SENTENCEPIECE_FILE if old.startswith("sentencepiece:") else tokenizers.HUGGING_FACE_FILE
        folder = record["prepared"] or "the converted run's tokenizer"
        legal = (
            "bytes"
            if old == "bytes"
            else f"the same sources, where it was trained on them, or its file, {folder}/{file}"
        )
        message = f"gives tokenizer {new}, the checkpoint was made with {old}; legal: {legal}"
        raise ConfigError([Problem("data.tokenizer", config.model_dump()["data"]["tokenizer"], message)])


def _refuse(changes: list[Change]) -> None:
    if changes:
        raise ConfigError([Problem(key, new, f"the checkpoint was made with {old!r}") for key, old, new in changes])

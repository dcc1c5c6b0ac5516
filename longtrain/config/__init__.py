"""The config of a run: typed, frozen, and checked whole before any device is touched.

`schema.py` declares the keys, `reading.py` reads files and overrides, `validation.py` judges each key,
`checks.py` judges them together, `writing.py` writes a config out. Nothing here imports jax.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longtrain.config import huggingface, reading
from longtrain.config.checks import BYTES_VOCABULARY, cross_problems, resolve_mesh
from longtrain.config.schema import (
    AttentionConfig,
    BatchConfig,
    CheckpointConfig,
    ClusterConfig,
    CommunicationConfig,
    Config,
    DataConfig,
    EvalConfig,
    GuardConfig,
    LinearScaling,
    Llama3Scaling,
    MemoryConfig,
    MeshConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    RopeConfig,
    RunConfig,
    SourceConfig,
    TokenizerTraining,
    YarnScaling,
)
from longtrain.config.validation import NOT_SET, validate
from longtrain.config.writing import to_yaml
from longtrain.errors import ConfigError, Problem

__all__ = [
    "AttentionConfig",
    "BYTES_VOCABULARY",
    "BatchConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CommunicationConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "GuardConfig",
    "LinearScaling",
    "Llama3Scaling",
    "MemoryConfig",
    "MeshConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RopeConfig",
    "RunConfig",
    "SourceConfig",
    "TokenizerTraining",
    "YarnScaling",
    "from_mapping",
    "json_schema",
    "load",
    "load_with_origins",
    "resolve_mesh",
    "show",
    "to_yaml",
    "with_overrides",
]


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """The config of a YAML file with `dotted.key=value` overrides. Raises ConfigError with every problem."""
    return load_with_origins(path, overrides)[0]


def load_with_origins(path: str | Path, overrides: Iterable[str] = ()) -> tuple[Config, dict[str, str]]:
    """The config, and for each dotted key what set it: a file, `preset NAME`, `override` or `default`."""
    return _resolve(reading.read_file(path), overrides, str(path))


def from_mapping(tree: dict[str, Any], overrides: Iterable[str] = (), source: str = "config") -> Config:
    """The config of a nested mapping in memory, read and checked like a file. Raises ConfigError."""
    return _resolve(reading.with_origin(tree, source), overrides, source)[0]


def with_overrides(config: Config, *overrides: str) -> Config:
    """The config with some keys changed, checked whole again. Raises ConfigError."""
    return from_mapping(config.model_dump(), overrides)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a resolved config, with each key's description."""
    return Config.model_json_schema() | {
        "title": "A resolved longtrain config",
        "description": "What `longtrain config CONFIG` prints and a run's config.yaml holds, not every file that "
        "can be loaded: it has no `extends`, and the sizes of `model` and the other required keys are there, which a "
        "file may leave to `model.preset`, to the files it extends or to overrides.",
    }


def show(
    path: str | Path | None, overrides: Iterable[str] = (), *, origins: bool = False, schema: bool = False
) -> str:
    """What `longtrain config` prints: the resolved config as YAML, or its JSON schema (needs no path)."""
    if schema:
        return json.dumps(json_schema(), indent=2) + "\n"
    assert path is not None, "only the schema can be shown without a config"
    config, sources = load_with_origins(path, overrides)
    return to_yaml(config, sources if origins else None)


def _resolve(tree: dict[str, Any], overrides: Iterable[str], source: str) -> tuple[Config, dict[str, str]]:
    problems: list[Problem] = []
    for override in overrides:
        try:
            tree = reading.apply_override(tree, override)
        except ConfigError as error:
            problems += error.problems
    unreadable = False
    if (preset := _preset(tree)) in reading.preset_names():
        tree = reading.merge(reading.read_preset(preset), tree)
    elif preset is not None:
        legal = ", ".join(reading.preset_names())
        problems.append(Problem("model.preset", preset, f"no such preset; legal: {legal}"))
        unreadable = True
    try:
        theirs = _model_of_folder(tree)
    except ValueError as error:
        problems.append(Problem("checkpoint.init_from", _value(tree, "checkpoint", "init_from"), str(error)))
        unreadable = True
    else:
        problems += _conflicts(tree, theirs)
        tree = reading.merge(theirs, tree)
    set_by = {key: leaf.origin for key, leaf in reading.leaves(tree)}

    values, key_problems = validate(reading.values(tree))
    problems += [*key_problems, *cross_problems(values)]
    if unreadable:  # what it would have set is not missing besides
        problems = [problem for problem in problems if not _is_missing_size(problem)]
    if problems:
        raise ConfigError([_located(problem, set_by, source) for problem in problems], source=source)
    config = Config.model_validate(reading.values(tree))
    return config, {key: set_by.get(key, "default") for key, _ in reading.leaves(config.model_dump())}


def _preset(tree: dict[str, Any]) -> Any:
    """The name that `model.preset` gives, if it gives one."""
    name = _value(tree, "model", "preset")
    return name if isinstance(name, str) else None


def _value(tree: dict[str, Any], section: str, name: str) -> Any:
    """The value of `section.name`, None where it is not there or no leaf."""
    inner = tree.get(section)
    leaf = inner.get(name) if isinstance(inner, dict) else None
    return leaf.value if isinstance(leaf, reading.Leaf) else None


def _model_of_folder(tree: dict[str, Any]) -> dict[str, Any]:
    """The `model` that `checkpoint.init_from: hf:DIR` takes from DIR, to lie beneath all; empty where it is none such.

    A folder that is not there is no problem to a config that needs nothing of it: a run that has begun goes on without.

    Raises:
      ValueError: when its config.json cannot be read or is of another architecture.
    """
    init_from = _value(tree, "checkpoint", "init_from")
    folder = huggingface.folder_of(init_from)
    model = tree.get("model", {})
    has_all = isinstance(model, dict) and model.keys() >= _SIZES
    if folder is None or has_all and not folder.exists():
        return {}
    return {"model": reading.with_origin(huggingface.model_keys(folder), str(init_from))}


_SIZES = {name for name, field in ModelConfig.model_fields.items() if field.is_required()}


def _conflicts(tree: dict[str, Any], theirs: dict[str, Any]) -> list[Problem]:
    """What of `model` is given and is another in the folder: all but a longer vocabulary (padding), rope and dtypes."""
    found = []
    for name, leaf in theirs.get("model", {}).items():
        given = _value(tree, "model", name)
        if name == "rope" or given is None or given == leaf.value:
            continue
        padded = name == "vocab_size" and isinstance(given, int | float) and given > leaf.value
        if not padded:
            message = f"the weights of {leaf.origin} have {leaf.value!r}: leave the key out, or take other weights"
            found.append(Problem(f"model.{name}", given, message))
    return found


def _is_missing_size(problem: Problem) -> bool:
    """Whether the problem is a missing `model` key that a preset would set."""
    return problem.value is NOT_SET and problem.key.removeprefix("model.") in ModelConfig.model_fields


def _located(problem: Problem, set_by: dict[str, str], source: str) -> Problem:
    """The problem with a word on where the value was set, when that is not the config's own file."""
    origin = set_by.get(problem.key, source)
    message = problem.message
    if _is_missing_size(problem):
        message = f"{message}, here or by model.preset ({', '.join(reading.preset_names())})"
    if origin != source:
        message = f"{message} ({'given as an' if origin == 'override' else 'from'} {origin})"
    return dataclasses.replace(problem, message=message)

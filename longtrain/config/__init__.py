"""The config of a run: typed, frozen, and checked whole before any device is touched.

`schema.py` declares the keys, `reading.py` reads files and overrides, `validation.py` judges each key,
`checks.py` judges them together, `writing.py` writes a config out. Nothing here imports jax.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longtrain.config import reading
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
    unknown_preset = None
    if (preset := _preset(tree)) in reading.preset_names():
        tree = reading.merge(reading.read_preset(preset), tree)
    elif preset is not None:
        legal = ", ".join(reading.preset_names())
        unknown_preset = Problem("model.preset", preset, f"no such preset; legal: {legal}")
        problems.append(unknown_preset)
    set_by = {key: leaf.origin for key, leaf in reading.leaves(tree)}

    values, key_problems = validate(reading.values(tree))
    problems += [*key_problems, *cross_problems(values)]
    if unknown_preset:  # what it would have set is not missing besides
        problems = [problem for problem in problems if not _is_missing_size(problem)]
    if problems:
        raise ConfigError([_located(problem, set_by, source) for problem in problems], source=source)
    config = Config.model_validate(reading.values(tree))
    return config, {key: set_by.get(key, "default") for key, _ in reading.leaves(config.model_dump())}


def _preset(tree: dict[str, Any]) -> Any:
    """The name that `model.preset` gives, if it gives one."""
    model = tree.get("model")
    leaf = model.get("preset") if isinstance(model, dict) else None
    return leaf.value if isinstance(leaf, reading.Leaf) and isinstance(leaf.value, str) else None


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

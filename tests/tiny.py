"""The smallest config that is whole, for tests to build upon."""

from typing import Any

from longtrain.config import Config, from_mapping

TREE: dict[str, Any] = {
    "run": {"steps": 4},
    "model": {"preset": "tiny", "compute_dtype": "float32"},
    "sequence_length": 64,
    "batch": {"sequences": 4},
    "optimizer": {"learning_rate": 1e-3},
    "data": {"sources": [{"path": "python-stdlib"}], "tokenizer": "bytes"},
}


def config(*overrides: str) -> Config:
    """A float32 Llama of two layers on rows of 64 byte tokens, with `dotted.key=value` overrides."""
    return from_mapping(TREE, overrides)

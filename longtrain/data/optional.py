"""Libraries that only some sources or tokenizers need: loaded when asked for, refused by name where not installed."""

import importlib
from typing import Any

from longtrain.errors import ConfigError, Problem

_EXTRA = {
    "fsspec": "data",
    "pyarrow.parquet": "data",
    "zstandard": "data",
    "tokenizers": "hf",
    "matplotlib.figure": "plot",
}


def need(module: str, key: str, value: object) -> Any:
    """The module, for the sake of a config's `key` of that `value`. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package, extra = module.partition(".")[0], _EXTRA[module]
        message = f"needs the package {package}, which is not installed: pip install 'longtrain[{extra}]'"
        raise ConfigError([Problem(key, value, message)]) from error

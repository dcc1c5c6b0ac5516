"""A config as YAML that reads back as the same config."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from longtrain.config.reading import parse
from longtrain.config.schema import Config


def to_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Every key with its value, in the order of declaration; with `origins`, each with what set it."""
    lines = list(_lines(config.model_dump(), "", 0))
    if origins is None:
        return "".join(f"{text}\n" for text, _ in lines)
    column = max(len(text) for text, key in lines if key and len(text) <= 60) + 2
    return "".join(f"{text:<{column - 2}}  # {origins[key]}\n" if key else f"{text}\n" for text, key in lines)


def _lines(tree: dict[str, Any], prefix: str, indent: int) -> Iterator[tuple[str, str | None]]:
    """(line, dotted key of the leaf on it, or None)."""
    for name, value in tree.items():
        start, key = f"{' ' * indent}{name}:", f"{prefix}{name}"
        if isinstance(value, dict):
            yield start, None
            yield from _lines(value, f"{key}.", indent + 2)
        elif isinstance(value, tuple) and value and isinstance(value[0], dict):
            yield start, None
            for place, item in enumerate(value):
                dash = f"{' ' * indent}- "
                for text, leaf in _lines(item, f"{key}.{place}.", indent + 2):
                    yield dash + text[indent + 2 :], leaf
                    dash = " " * (indent + 2)
        else:
            yield f"{start} {scalar(value)}", key


def scalar(value: Any) -> str:
    """A leaf as YAML, on one line: quoted only where the plain word would be read as something else."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(scalar, value))}]"
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z0-9_./-][A-Za-z0-9_./*+=-]*", value) and parse(value) == value
        return value if plain else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)  # null, true, false and numbers are spelled alike in JSON and YAML

"""From YAML files and overrides to one tree of plain values, in which each leaf knows where it comes from.

Numbers are read as people write them (`1e-4`, `1_000`, `.5`); only `true` and `false` are booleans; a zero in
front, a colon or a dash makes no octal number, no time and no date. Files and overrides are read the same.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from longtrain.errors import ConfigError, Problem

_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_INT = rf"[-+]?{_DIGITS}"
_FLOAT = rf"[-+]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][-+]?[0-9]+)?"
_NUMBER_STARTS = list("-+.0123456789")
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with our own reading of plain words and of mappings, and none of its own."""


_Loader.yaml_implicit_resolvers = {}


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    """Keys are always text (`on` and `1` too) and never there twice."""
    tree: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key must be text", key_node.start_mark)
        if key_node.value in tree:
            message = f"the key {key_node.value!r} is there twice"
            raise yaml.constructor.ConstructorError(None, None, message, key_node.start_mark)
        tree[key_node.value] = loader.construct_object(value_node, deep=True)
    return tree


def _word(tag: str, pattern: str, first: list[str], read: Callable[[str], Any]) -> None:
    _Loader.add_implicit_resolver(f"{_TAG}{tag}", re.compile(f"(?:{pattern})$"), first)
    _Loader.add_constructor(f"{_TAG}{tag}", lambda loader, node: read(node.value))


# They are tried in this order: what looks like an int is not asked whether it is a float.
_word("null", "~|null|Null|NULL|None|", ["~", "n", "N", ""], lambda word: None)
_word("bool", "true|True|TRUE|false|False|FALSE", list("tTfF"), lambda word: word.lower() == "true")
_word("int", _INT, _NUMBER_STARTS, int)
_word("float", _FLOAT, _NUMBER_STARTS, float)
_Loader.add_constructor(f"{_TAG}map", _mapping)


def parse(text: str) -> Any:
    """The value that a YAML text stands for. Raises yaml.YAMLError or ValueError."""
    return yaml.load(text, Loader=_Loader)  # a safe loader: it makes plain values only


@dataclass(frozen=True)
class Leaf:
    """A value that is no section, with what set it."""

    value: Any
    origin: str


def with_origin(value: Any, origin: str) -> Any:
    """The same tree with each leaf marked. A list is a leaf unless it holds mappings."""
    if isinstance(value, dict):
        return {key: with_origin(child, origin) for key, child in value.items()}
    if isinstance(value, list | tuple):
        if any(isinstance(child, dict) for child in value):
            return [with_origin(child, origin) for child in value]
        return Leaf(list(value), origin)
    return Leaf(value, origin)


def values(tree: Any) -> Any:
    """The plain values of a marked tree."""
    if isinstance(tree, dict):
        return {key: values(child) for key, child in tree.items()}
    if isinstance(tree, list):
        return [values(child) for child in tree]
    return tree.value


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf of a tree (marked or plain) with its dotted key: `data.sources.0.weight`."""
    if isinstance(tree, dict):
        children: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list | tuple) and any(isinstance(child, dict) for child in tree):
        children = enumerate(tree)
    else:
        yield key, tree
        return
    for name, child in children:
        yield from leaves(child, f"{key}.{name}" if key else str(name))


def merge(below: Any, above: Any) -> Any:
    """Mappings key by key, everything else (lists too) replaced.

    A mapping that names another `type` is another thing, and replaces the one below it too.
    """
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    if "type" in below and "type" in above and values(below["type"]) != values(above["type"]):
        return above
    return below | {key: merge(below[key], child) if key in below else child for key, child in above.items()}


def read_file(path: str | Path) -> dict[str, Any]:
    """A file's marked tree, upon those it extends. Raises ConfigError when one cannot be read."""
    return _read_file(Path(path), ())


def _read_file(path: Path, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    def refuse(key: str, value: object, message: str) -> ConfigError:
        return ConfigError(
            [Problem(key, value, message)], source=str(extended_by[0] if extended_by else path)
        )

    if any(path.resolve() == other.resolve() for other in extended_by):
        chain = " -> ".join(str(link) for link in (*extended_by, path))
        raise refuse("extends", str(path), f"extends itself: {chain}")
    key = "extends" if extended_by else "CONFIG"
    try:
        tree = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse(key, str(path), f"cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise refuse(key, str(path), f"is not a YAML file that can be read: {_one_line(error)}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise refuse(key, str(path), f"must be a mapping of sections, is a {type(tree).__name__}")

    bases = tree.pop("extends", [])
    if isinstance(bases, str):
        bases = [bases]
    if not (isinstance(bases, list) and all(isinstance(base, str) for base in bases)):
        raise refuse("extends", bases, f"in {path} must be a file or a list of files, relative to it")
    result: dict[str, Any] = {}
    for base in bases:
        result = merge(result, _read_file(path.parent / base, (*extended_by, path)))
    return merge(result, with_origin(tree, str(path)))


def preset_names() -> list[str]:
    """The presets that `model.preset` may name."""
    files = resources.files("longtrain.presets").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read_preset(name: str) -> dict[str, Any]:
    """The marked tree of a shipped model: `{"model": {...}}`."""
    text = resources.files("longtrain.presets").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return {"model": with_origin(parse(text), f"preset {name}")}


def apply_override(tree: dict[str, Any], override: str) -> dict[str, Any]:
    """The tree with one `dotted.key=value` set; the value is read as YAML. Raises ConfigError."""

    def refuse(key: str, value: object, message: str) -> ConfigError:
        return ConfigError([Problem(key, value, message)], source=f"override {override!r}")

    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        raise refuse("override", override, "must be dotted.key=value, as in mesh.context=4")
    if not text.strip():
        raise refuse(key, text, "the override has no value; write null or '\"\"' if that is meant")
    if key == "extends":
        raise refuse(key, text, "only a file can extend another")
    try:
        value = parse(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise refuse(key, text, f"cannot be read as YAML (quote it?): {_one_line(error)}") from None
    try:
        return _assign(tree, key.split("."), with_origin(value, "override"))
    except LookupError as error:
        raise refuse(key, value, str(error.args[0])) from None


def _assign(tree: Any, names: list[str], value: Any) -> Any:
    """A copy of `tree` with the place `names` set. Raises LookupError where there is no such place."""
    if not names:
        return value
    name, *rest = names
    if isinstance(tree, Leaf) and isinstance(tree.value, list):
        # A list of plain values is one leaf: one item of it changes the whole.
        tree = [Leaf(item, tree.origin) for item in tree.value]
        result = _assign(tree, names, value)
        return (
            result
            if any(isinstance(item, dict) for item in result)
            else with_origin(values(result), "override")
        )
    if isinstance(tree, list):
        if not re.fullmatch("[0-9]+", name) or int(name) >= len(tree):
            legal = f"0 to {len(tree) - 1}" if tree else "none, the list is empty"
            raise LookupError(f"{name!r} is no place in a list of {len(tree)}; legal places: {legal}")
        place = int(name)
        return [*tree[:place], _assign(tree[place], rest, value), *tree[place + 1 :]]
    if isinstance(tree, Leaf):
        if tree.value is not None:
            raise LookupError(f"has no key {name!r} to set: its parent is {tree.value!r}, from {tree.origin}")
        tree = {}
    return tree | {name: _assign(tree.get(name, {}), rest, value)}


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem}, line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())

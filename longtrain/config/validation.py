"""A tree of plain values against the declared keys: every value that is valid, and every problem.

Pydantic judges each leaf by its declared type. The walk over the sections is our own, so that one bad key
hides no other, and each problem names its dotted key, the value given and what is legal.
"""

import difflib
import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from longtrain.config.schema import Config, Legal, Section
from longtrain.errors import Problem


class _NotSet:
    """Stands for the value of a key that is not there."""

    def __repr__(self) -> str:
        return "(not set)"


NOT_SET = _NotSet()


def declared_type(field: FieldInfo) -> Any:
    """The field's type with its constraints, as written."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def legal(kind: Any) -> str:
    """What a value of a declared type may be, in words: "a whole number >= 1, or null"."""
    if get_origin(kind) is Annotated:
        inner, *metadata = get_args(kind)
        for mark in metadata:
            if isinstance(mark, Legal):
                return mark.text
        bounds = [
            f"{sign} {getattr(mark, name)}"
            for mark in metadata
            for bound, sign, name in ((Gt, ">", "gt"), (Ge, ">=", "ge"), (Lt, "<", "lt"), (Le, "<=", "le"))
            if isinstance(mark, bound)
        ]
        return f"{legal(inner)} {' and '.join(bounds)}".rstrip()
    if get_origin(kind) is Literal:
        words = [str(word) for word in get_args(kind)]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if get_origin(kind) in (Union, types.UnionType):
        return ", or ".join(legal(option) for option in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, each {legal(get_args(kind)[0])}"
    if isinstance(kind, type) and issubclass(kind, Section):
        return f"a mapping of {', '.join(kind.model_fields)}"
    return {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "null",
    }[kind]


def sections_in(kind: Any) -> list[type[Section]]:
    """The sections that a value of this type may be."""
    if isinstance(kind, type) and issubclass(kind, Section):
        return [kind]
    if get_origin(kind) is Annotated:
        return sections_in(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return [section for option in get_args(kind) for section in sections_in(option)]
    return []


def item_section(kind: Any) -> type[Section] | None:
    """The section that each item of a list of this type is, if it is a list of sections."""
    if get_origin(kind) is Annotated:
        return item_section(get_args(kind)[0])
    if get_origin(kind) is tuple and (sections := sections_in(get_args(kind)[0])):
        return sections[0]
    return None


def declared_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every declared key, dotted, as declared; `data.sources.0.path` stands for every place."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        kind = declared_type(field)
        if field.annotation not in sections_in(kind):  # a section itself is no key: its keys are
            yield key, field
        if (item := item_section(kind)) is not None:
            yield from declared_keys(item, f"{key}.0.")
        seen: set[str] = set()
        for inner in sections_in(kind):
            for inner_key, inner_field in declared_keys(inner, f"{key}."):
                if inner_key not in seen:
                    yield inner_key, inner_field
                seen.add(inner_key)


def validate(tree: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """(dotted key -> value, of every leaf that is valid or has a default; every problem)."""
    found: dict[str, Any] = {}
    problems = list(_section(tree, Config, "", found))
    return found, problems


def _section(
    tree: dict[str, Any], section: type[Section], prefix: str, found: dict[str, Any]
) -> Iterator[Problem]:
    for name in [name for name in tree if name not in section.model_fields]:
        yield Problem(
            f"{prefix}{name}", tree[name], f"unknown key; the nearest is {_nearest(name, section, prefix)}"
        )
    for name, field in section.model_fields.items():
        yield from _field(tree.get(name, NOT_SET), field, f"{prefix}{name}", found)


def _field(value: Any, field: FieldInfo, key: str, found: dict[str, Any]) -> Iterator[Problem]:
    kind = declared_type(field)
    item = item_section(kind)
    sections = sections_in(kind)
    if value is NOT_SET:
        if field.annotation in sections:
            yield from _section({}, sections[0], f"{key}.", found)
        elif field.is_required():
            yield Problem(key, value, f"required: {legal(kind)}")
        else:
            found[key] = field.get_default()
    elif isinstance(value, dict) and sections:
        chosen = _chosen_section(value, sections)
        if chosen is None:
            tags = [get_args(section.model_fields["type"].annotation)[0] for section in sections]
            yield Problem(f"{key}.type", value.get("type", NOT_SET), f"must be one of {', '.join(tags)}")
        else:
            yield from _section(value, chosen, f"{key}.", found)
    elif isinstance(value, list) and value and item is not None:
        for place, child in enumerate(value):
            if isinstance(child, dict):
                yield from _section(child, item, f"{key}.{place}.", found)
            else:
                yield Problem(f"{key}.{place}", child, f"must be {legal(item)}")
    elif isinstance(value, list) and item is not None:
        if any(isinstance(mark, MinLen) for mark in field.metadata):
            yield Problem(key, value, f"must not be empty: {legal(kind)}")
        else:
            found[key] = ()
    else:
        adapter = TypeAdapter(kind, config=None if sections else Section.model_config)
        try:
            found[key] = adapter.validate_python(value)
        except ValidationError:
            yield Problem(key, value, f"must be {legal(kind)}{_quoting(value, key, adapter)}")


def _quoting(value: Any, key: str, adapter: TypeAdapter[Any]) -> str:
    """How to give a number, true or false as text, where the key takes that text."""
    if not isinstance(value, int | float):
        return ""
    word = json.dumps(value)
    try:
        adapter.validate_python(word)
    except ValidationError:
        return ""
    kind = "boolean" if isinstance(value, bool) else "number"
    return f"; unquoted it is a {kind}, so quote it, e.g. {key}='\"{word}\"' (in a file: \"{word}\")"


def _chosen_section(value: dict[str, Any], sections: list[type[Section]]) -> type[Section] | None:
    """The section a mapping is meant to be: the only one, or the one of its `type`."""
    if len(sections) == 1:
        return sections[0]
    for section in sections:
        if value.get("type") in get_args(section.model_fields["type"].annotation):
            return section
    return None


def _nearest(name: str, section: type[Section], prefix: str) -> str:
    """The legal key most like an unknown one: near in spelling, of the same name elsewhere, or the likest."""
    if close := difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.7):
        return prefix + close[0]
    everywhere = [key for key, _ in declared_keys()]
    for key in everywhere:
        if key.rpartition(".")[2] == name:
            return key
    last_names = {key.rpartition(".")[2]: key for key in reversed(everywhere)}
    if close := difflib.get_close_matches(name, last_names, n=1, cutoff=0.8):
        return last_names[close[0]]
    beside = [prefix + field for field in section.model_fields]
    return difflib.get_close_matches(prefix + name, beside, n=1, cutoff=0)[0]

#!/usr/bin/env python
"""Writes docs/config.md from the declarations in longtrain/config/schema.py, or prints it (argument `-`)."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from longtrain.config import reading
from longtrain.config.schema import Config, Section
from longtrain.config.validation import declared_type, item_section, legal, sections_in
from longtrain.config.writing import scalar

PAGE = Path(__file__).parent.parent / "docs" / "config.md"

HEAD = """\
# Every key of a config

Made by `scripts/write_config_reference.py` from the declarations in `longtrain/config/schema.py`: change
them, not this page. `longtrain config FILE` shows a config with every default filled in, `--origins` what set
each value, and `longtrain config --schema` the JSON schema.

- A file is YAML: sections, and in them keys. `extends: other.yaml` (or a list of files), relative to the
  file, lays it upon others: mappings are merged key by key, lists are replaced, and so is a mapping that
  names another `type`.
- On the command line, `dotted.key=value` overrides a key: `mesh.context=4`, `data.sources.0.weight=0.5`.
  Values are read as in a file.
- Numbers may be spelled `1e-4`, `1e4`, `1_000` or `.5`. Only `true` and `false` are booleans; `null` is no
  value.
- What a config does not set has the default below. Paths are relative to the working directory.
- Every problem of a config is reported at once, before any device is touched.
"""


def page() -> str:
    lines = [HEAD, "## Top level", "", *table(Config, "")]
    for title, prefix, section in parts(Config, ""):
        lines += [f"## {title}", "", inspect.cleandoc(section.__doc__ or ""), "", *table(section, prefix)]
    presets = ", ".join(f"`{name}`" for name in reading.preset_names())
    lines += ["## Presets", "", f"`model.preset` is one of {presets}."]
    return "\n".join(lines) + "\n"


def parts(section: type[Section], prefix: str) -> Iterator[tuple[str, str, type[Section]]]:
    """(title, prefix of its keys, section) of every section beneath one, in the order of declaration."""
    for name, field in section.model_fields.items():
        kind = declared_type(field)
        item = item_section(kind)
        key = f"{prefix}{name}.N" if item else f"{prefix}{name}"
        choices = [item] if item else sections_in(kind)
        for choice in choices:
            suffix = f" of type {legal(choice.model_fields['type'].annotation)}" if len(choices) > 1 else ""
            yield f"{key}{suffix}", f"{key}.", choice
            yield from parts(choice, f"{key}.")


def table(section: type[Section], prefix: str) -> list[str]:
    """The section's own keys, without the sections in it."""
    rows = [
        f"| `{prefix}{name}` | {default(field)} | {legal(declared_type(field))} | {field.description} |"
        for name, field in section.model_fields.items()
        if field.annotation not in sections_in(field.annotation)
    ]
    if not rows:
        return []
    return ["| key | default | legal | meaning |", "| --- | --- | --- | --- |", *rows, ""]


def default(field: FieldInfo) -> str:
    return "required" if field.is_required() else f"`{scalar(field.get_default())}`"


if __name__ == "__main__":
    if sys.argv[1:] == ["-"]:
        sys.stdout.write(page())
    else:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote {PAGE}")

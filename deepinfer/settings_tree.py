"""Trees of settings, from YAML and from dotted paths, and how they become a struct: what does not fit is named."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
import yaml

from deepinfer.errors import ConfigError

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_EXPECTED = re.compile(r"Expected `(.+)`, got `.+`")
_TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "array": "a list",
    "object": "a mapping",
}


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the mapping that `file` holds. Raises ConfigError that names the file and, if it is no YAML, the line."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't read the config file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no UTF-8 text ({error}); save it as UTF-8") from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no valid YAML: {_yaml_fault(error)}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold a mapping of sections, not a {type(tree).__name__}")
    return tree


def _yaml_fault(error: yaml.YAMLError) -> str:
    """Return what is wrong and where, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def parse_setting(setting: str) -> tuple[str, Any]:
    """Return path and value of "a.b=value"; the value is read as YAML where it is some."""
    path, separator, text = setting.partition("=")
    if not separator or not path:
        raise ConfigError(f"--set {setting!r} must look like section.field=value")
    try:
        return path, yaml.safe_load(text)
    except yaml.YAMLError:
        return path, text


def assign(tree: dict[str, Any], path: str, value: Any) -> None:
    """Put `value` at the dotted `path` of `tree`."""
    *sections, field = path.split(".")
    for section in sections:
        below = tree.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{section!r} is not a section", path=path)
        tree = below
    tree[field] = value


def convert(tree: dict[str, Any], struct: type[_Struct], sources: Mapping[str, str]) -> _Struct:
    """Return `tree` as a `struct`. Raises ConfigError that names the field, the value and what would do.

    `sources`: where values came from, see `name_of`. An option's word "off", which YAML reads as false, is spelt again.
    """
    _refuse_unknown(tree, struct, "")
    _spell_off(tree, struct)
    _refuse_unknown_words(tree, struct, "", sources)
    try:
        return msgspec.convert(tree, struct)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `")
        path = place.rstrip("`").removeprefix("$").removeprefix(".")
        raise ConfigError(_type_fault(message, tree, path), path=name_of(path, sources)) from error


def _type_fault(message: str, tree: dict[str, Any], path: str) -> str:
    """Return msgspec's `message` about the value at `path` in a user's words, with the value."""
    expected = _EXPECTED.match(message)
    value: Any = tree
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if expected is None or value is None:
        return message
    kinds = [_TYPE_WORDS.get(kind, kind) for kind in expected[1].split(" | ") if kind != "null"]
    return f"must be {' or '.join(kinds)}, not {value!r}"


def _refuse_unknown(tree: dict[str, Any], struct: type[msgspec.Struct], prefix: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if key not in fields:
            raise ConfigError(f"unknown key{nearest(str(key), fields)}", path=path)
        kind = fields[key]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if not isinstance(value, dict):
                raise ConfigError(f"must be a section with fields, not {value!r}", path=path)
            _refuse_unknown(value, kind, f"{path}.")


def _refuse_unknown_words(
    tree: dict[str, Any], struct: type[msgspec.Struct], prefix: str, sources: Mapping[str, str]
) -> None:
    """Refuse what is none of an option's words, with the words that are."""
    for field in msgspec.structs.fields(struct):
        if field.name not in tree:
            continue
        value, path = tree[field.name], f"{prefix}{field.name}"
        if isinstance(value, dict) and isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            _refuse_unknown_words(value, field.type, f"{path}.", sources)
        elif get_origin(field.type) is Literal and value not in get_args(field.type):
            words = ", ".join(get_args(field.type))
            raise ConfigError(f"{value!r} is not known; use {words}", path=name_of(path, sources))


def _spell_off(tree: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    """Where an option has the value "off", mean it: YAML reads the bare word as false."""
    for field in msgspec.structs.fields(struct):
        value = tree.get(field.name)
        if isinstance(value, dict) and isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            _spell_off(value, field.type)
        elif value is False and "off" in get_args(field.type):
            tree[field.name] = "off"


def name_of(path: str, sources: Mapping[str, str]) -> str:
    """Return the name under which the user has set `path`: its variable, or the path itself."""
    source = sources.get(path, path)
    return path if source in ("file", "--set") else source


def nearest(name: str, known: Mapping[str, object]) -> str:
    """Return the end of a message about an unknown `name`: the one that was meant, or all."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def flatten(tree: dict[str, Any], mappings: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return the values of `tree` by dotted path; a mapping that stands at one of `mappings` is a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in mappings:
            flat.update(flatten(value, mappings, f"{path}."))
        else:
            flat[path] = value
    return flat

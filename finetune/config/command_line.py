"""A YAML file and flags to a typed configuration; all problems of a configuration are reported at once.

The flags (``--section.key VALUE``) are built from the configuration classes, pydantic checks the values, and argparse
and PyYAML do the parsing.
"""

import argparse
import difflib
import math
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from finetune.config import foreign_keys
from finetune.errors import InputError
from finetune.start_up import is_first_process
from finetune.yaml_text import as_yaml

Config = TypeVar("Config", bound=BaseModel)


def parse(config_class: type[Config], arguments: Sequence[str]) -> Config:
    """Read ``--config FILE`` and the flags, which override it.

    Raises:
        InputError: with every problem found: unreadable file, unknown key, wrong type, missing key.
        SystemExit: code 0 after ``--help`` and ``--print_config``.
    """
    parser = _parser(config_class)
    known, unknown = parser.parse_known_args(list(arguments))
    if known.config is None and (file := next(iter(unknown), "")).endswith((".yaml", ".yml")) and file[:2] != "--":
        raise InputError(f"Give the configuration with --config {file}.")
    problems = [_unknown_flag(flag, config_class) for flag in unknown if flag.startswith("--")]
    if unknown and not problems:  # words after an unknown flag are assumed to be its value
        problems.append(f"{' '.join(unknown)!r} does not follow a flag; write --section.key VALUE, see --help.")
    values, file_problems = _read_file(known.config)
    if file_problems:  # the contents are unknown, so no key can be reported as missing
        raise InputError(problems + file_problems)
    if config_class.model_config.get("extra") != "forbid":  # of a recipe that is not known: its sections, no slips
        strange = [key for key in values if isinstance(key, str) and key not in config_class.model_fields]
        problems += [_unknown_key(key, config_class) for key in strange if _is_slip(key, values, config_class)]
    for section in config_class.model_fields:  # an absent or empty section gets its defaults, or lacks keys
        values[section] = {} if values.get(section) is None else values[section]
    fields = dict(_fields(config_class))
    for key, text in vars(known).items():
        if key in fields:
            section, name = key.split(".")
            if isinstance(values[section], dict):
                values[section][name] = _flag_value(text, fields[key])
    try:
        config = config_class.model_validate(values)
    except ValidationError as error:
        problems += [_sentence(e, config_class) for e in _one_of_each_key(error.errors())]
    if problems:
        raise InputError(problems)
    if known.print_config:
        if is_first_process():
            print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def to_yaml(config: BaseModel) -> str:
    """The resolved configuration as YAML that can be passed back with ``--config``."""
    return as_yaml(config.model_dump())


OF_RECIPES = {"dpo": "recipes/dpo.py", "pretrain": "recipes/pretrain.py"}
"""Sections that not every recipe has."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help.")

    def print_help(self, file: Any = None) -> None:
        if is_first_process():
            super().print_help(file)


def _fields(config_class: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Every key as ``section.name`` with its declaration."""
    for section, declaration in config_class.model_fields.items():
        section_class = declaration.annotation
        assert isinstance(section_class, type)
        assert issubclass(section_class, BaseModel)
        for name, field in section_class.model_fields.items():
            yield f"{section}.{field.alias or name}", field


def _parser(config_class: type[BaseModel]) -> argparse.ArgumentParser:
    parser = _Parser(
        description=sys.modules[config_class.__module__].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", default=None, help="YAML file with the sections below")
    parser.add_argument(
        "--print_config", action="store_true", default=False, help="print the resolved configuration as YAML and exit"
    )
    groups: dict[str, Any] = {}
    for key, field in _fields(config_class):
        section = key.split(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        default = "required" if field.is_required() else f"default: {as_flag(field.default)}"
        text = " ".join((field.description or "").split()).replace("%", "%%")
        groups[section].add_argument(
            f"--{key}", dest=key, metavar=_type_name(field.annotation), help=f"{text} ({default})"
        )
    return parser


def as_flag(value: Any) -> str:
    """A value as a flag says it, in YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()


def _type_name(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    if get_origin(annotation) in (Union, types.UnionType):
        return "|".join(_type_name(a) for a in get_args(annotation))
    if get_origin(annotation) is list:
        return "LIST"
    if get_origin(annotation) is dict:
        return "MAP"
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    return {str: "TEXT", int: "INT", float: "NUMBER", bool: "BOOL"}[annotation]


def _flag_value(text: str, field: FieldInfo) -> Any:
    """A flag's text parsed as YAML, but left as it stands where the key takes text: YAML would make a number of some,
    and cut others where a comment would begin. Quotes are YAML's."""
    try:
        value = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError):  # a number of too many digits, lists in lists in lists
        return text
    taken = _plain_types(field.annotation)
    if isinstance(value, str) and str in taken:
        return value if text.lstrip().startswith(("'", '"')) else text
    as_it_stands = str in taken and type(value) not in taken and not isinstance(value, list | None)
    return text if as_it_stands else value


def _plain_types(annotation: Any) -> set[Any]:
    """The types of which one is taken for a key, out of unions and their constraints."""
    if get_origin(annotation) is Annotated:
        return _plain_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return set().union(*map(_plain_types, get_args(annotation)))
    return {annotation}


def _read_file(path: str | None) -> tuple[dict[str, Any], list[str]]:
    if path is None:
        return {}, []
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
    except OSError as error:
        return {}, [f"--config {path}: the file cannot be read ({error.strerror}); check its name."]
    except yaml.MarkedYAMLError as error:
        return {}, [_not_yaml(path, error)]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return {}, [f"--config {path}: not valid YAML ({' '.join(str(error).split())}); fix the file."]
    if not isinstance(values, dict):
        return {}, [f"--config {path}: the file has no sections; see --help for the list."]
    return values, []


def _not_yaml(path: str, error: yaml.MarkedYAMLError) -> str:
    """The problem, with the line of the file and a caret below it."""
    mark = error.problem_mark
    assert mark is not None
    sentence = f"--config {path}: not valid YAML at line {mark.line + 1}, {error.problem}; fix the file:"
    return f"{sentence}\n{mark.get_snippet(indent=2)}"


class Loader(yaml.SafeLoader):
    """YAML in which `off` is a word, 010 is ten, a date is text, and equal keys are an error.

    PyYAML follows YAML 1.1, where on, off, yes and no are booleans: ``plan_check: off`` would be false. As in YAML 1.2,
    only true and false are; pydantic takes the words where a key is true or false. Neither does a 0 in front make a
    number octal, by which 010 and 008 would be the same seed. Of two equal keys PyYAML keeps the last without a word.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # as it is written, before merged sections come into it
        keys = [(key.tag, key.value) for key, _ in node.value if key.tag != _MERGE and not isinstance(key.value, list)]
        for tag, key in keys:
            if keys.count((tag, key)) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", node.start_mark)
        return node


_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
Loader.yaml_implicit_resolvers = {
    first: [
        (tag, form)
        for tag, form in forms
        if tag not in (_TAG + "int", _TAG + "timestamp") and (tag != _TAG + "bool" or first in "tTfF")
    ]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(_TAG + "int", re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789"))


def _unknown_flag(flag: str, config_class: type[BaseModel]) -> str:
    key = flag.removeprefix("--").split("=")[0]
    return f"Unknown flag --{key}; {_nearest(key, config_class)}see --help for all flags."


def _unknown_key(key: str, config_class: type[BaseModel]) -> str:
    return f"Unknown key {key}; {_nearest(key, config_class)}see --help for all keys."


def _is_slip(key: str, values: dict[str, Any], config_class: type[BaseModel]) -> bool:
    """Whether a key of a file stands for a section that is missing there, or is a key outside of its section."""
    sections = difflib.get_close_matches(key, config_class.model_fields, n=1)
    is_outside = not isinstance(values[key], dict) and _nearest(key, config_class) != ""
    return is_outside or any(section not in values for section in sections)


def _nearest(key: str, config_class: type[BaseModel]) -> str:
    keys = [k for k, _ in _fields(config_class)] + ([] if "." in key else list(config_class.model_fields))
    section = key.partition(".")[0]
    if section not in config_class.model_fields and (script := OF_RECIPES.get(section)):
        return f"it is for {script}: launch that, or leave it out. Otherwise "
    same_name = [k for k in keys if k.split(".")[-1] == key.split(".")[-1]]
    if not same_name and (here := foreign_keys.HERE.get(key.split(".")[-1])):
        section = here.partition(".")[0]
        script = None if section in config_class.model_fields else OF_RECIPES.get(section)
        of = f" of {script}" if script else ""
        return f"here that is {here}{of} (docs/migrating.md). Otherwise "
    close = same_name or difflib.get_close_matches(key, keys, n=1)
    return f"did you mean {close[0]}? Otherwise " if close else ""


def _one_of_each_key(errors: Sequence[Any]) -> list[Any]:
    """For a key that takes several types, pydantic reports an error for each of them; the nearest miss says most.

    All of them come along as ``misses``.
    """
    of_key: dict[tuple[str | int, ...], list[Any]] = {}
    for error in errors:
        of_key.setdefault(error["loc"][:2], []).append(error)
    nearest = [max(each, key=lambda e: (len(e["loc"]), not e["type"].endswith("_type"))) for each in of_key.values()]
    return [{**error, "misses": [e["type"] for e in each]} for error, each in zip(nearest, of_key.values())]


def _sentence(error: Any, config_class: type[BaseModel]) -> str:
    """One pydantic error as a sentence that ends in what to do."""
    location = [str(part) for part in error["loc"]]
    key = ".".join(location[:2])
    if error["type"] == "extra_forbidden" and len(location) > 2:
        return (
            f"{key}: unknown key {location[-1]} in an entry of the list; remove it, or see --help for the allowed keys."
        )
    if error["type"] == "missing" and len(location) > 2:
        return f"{key}: an entry of the list lacks the key {location[-1]}; add it."
    if error["type"] == "missing":
        return f"{key} is missing; set it in the YAML file or with --{key}."
    if error["type"] == "extra_forbidden":
        return _unknown_key(key, config_class)
    if isinstance(refused := error.get("ctx", {}).get("error"), InputError):  # a section has looked into a file
        return str(refused)
    if len(location) == 1:
        return f"{key}: {error['input']!r} is not a section; indent its keys below it, see --help."
    message = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ").partition(", unable to")[0]
    if error["type"] in ("too_short", "too_long"):  # "List should have at least 2 items after validation, not 1"
        message = f"a list of {message.partition('should have ')[2].partition(' after')[0]}"
    if len(error["misses"]) > 1 and all(
        miss.endswith(("_type", "_parsing", "literal_error")) for miss in error["misses"]
    ):
        message = _allowed(dict(_fields(config_class))[key].annotation, error["input"])
    return f"{key}: must be {message}, got {error['input']!r}; change it, or see --help."


def _allowed(annotation: Any, given: Any) -> str:
    """The types that a key takes, in words; with the list that the user may have meant."""
    if get_origin(annotation) is Annotated:
        return _allowed(get_args(annotation)[0], given)
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_allowed(each, given) for each in get_args(annotation))
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is list:
        return f"a list such as [{given}]" if isinstance(given, str) else "a list"
    if get_origin(annotation) is dict:
        return "a mapping such as {name: value}"
    return {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}[
        annotation
    ]

"""YAML as run.yaml and ``--print_config`` have it: in the order of its keys, with every character that can be shown."""

from typing import Any

import yaml

_NEXT_LINE = "\x85"


class _Dumper(yaml.SafeDumper):
    """Escapes U+0085, which PyYAML writes as it is, and reads as a space or a line feed."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _NEXT_LINE in text else None)


_Dumper.add_representer(str, _text)


def as_yaml(value: Any) -> str:
    """A value of plain types as YAML, from which every text in it is read as it was."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)

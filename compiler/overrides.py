"""Change a request from the command line: ``microbatches=8``, ``module.1.pipeline=4``.

A key is a dotted path into the TOML table, with numbers for places in an array. A value is read as
TOML; what is no TOML value is taken as text.
"""

import copy
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from mllm_compile.compiler.errors import RequestError, explain


def override(table: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """A copy of ``table`` with every ``key=value`` of ``changes`` applied in order."""
    changed = copy.deepcopy(dict(table))
    for change in changes:
        key, equals, value = change.partition("=")
        if not key or not equals:
            raise RequestError(explain(f"override {change!r}", expected="like microbatches=8"))
        _set(changed, key, _value(value))
    return changed


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(table: Any, key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        table = table.setdefault(part, {}) if isinstance(table, dict) else _entry(table, part, key)
    if isinstance(table, dict):
        table[last] = value
    else:
        _entry(table, last, key)
        table[int(last)] = value


def _entry(table: Any, part: str, key: str) -> Any:
    if isinstance(table, list) and part.isdecimal() and int(part) < len(table):
        return table[int(part)]
    expected = f"a number below {len(table)}" if isinstance(table, list) else "no further key"
    raise RequestError(explain(f"override {key!r}", expected=expected, got=part))

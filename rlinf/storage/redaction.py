"""What of a config, a command or a text is written to files: everything but secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "<redacted>"
_LOGIN = re.compile(r"(\w://)[^/\s'\"]+@")  # http://user:password@host; a password may hold @
_TOKEN = re.compile(r"\b(?:hf|ghp|gho|glpat|sk|xox[abp]|wandb_v1)[-_][A-Za-z0-9_-]{16,}")
_SECRET_NAME = re.compile(r"(?:^|[._-])(?:password|passwd|secret|token|credentials?|(?:api|access)_?key)$", re.I)
_ARGUMENT = re.compile(r"([\w.@+~-]+)=(\S+)")


class FromEnvironment(str):
    """A value that came from an environment variable; files show how it was written, such as `${oc.env:HOME}/x`."""

    written: str

    def __new__(cls, value: str, written: str) -> FromEnvironment:
        text = super().__new__(cls, value)
        text.written = written
        return text

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # str's own has one
        return str(self), self.written


def redacted(value: Any, name: str = "") -> Any:
    """A tree of plain values with its secrets replaced: values of environment variables, passwords, tokens.

    Example: redacted({"proxy": "http://me:1234@host:1"}) == {"proxy": "http://<redacted>@host:1"}
    """
    if isinstance(value, Mapping):
        return {key: redacted(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner, name) for inner in value]
    if isinstance(value, FromEnvironment):
        return value.written
    if isinstance(value, str):
        return HIDDEN if value and _SECRET_NAME.search(name) else redacted_text(value)
    return value


def redacted_text(text: str) -> str:
    """A text without passwords in addresses and without what looks like a token."""
    return _TOKEN.sub(HIDDEN, _LOGIN.sub(rf"\1{HIDDEN}@", text))


def redacted_command(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command; of `key=value` the value is hidden where the key names a secret."""

    def hide(found: re.Match[str]) -> str:
        return f"{found[1]}={HIDDEN}" if _SECRET_NAME.search(found[1]) else found[0]

    return [_ARGUMENT.sub(hide, redacted_text(argument)) for argument in arguments]

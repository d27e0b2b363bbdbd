r"""``${a.b}`` in a configuration of one's own: another key's value; ``${oc.env:NAME}``: a variable of the environment.

A value that is ``${a.b}`` alone is that key's value, whatever it is; inside a text it is written into the text.
``${oc.env:NAME,default}`` has a default, ``\${`` is a plain ``${``. What is read from the environment is written into
``config.yaml`` of the run, its checkpoints and their model cards, so secrets are refused. Files that a run wrote are
read without any of this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from capt.pretrain.base.errors import ConfigError, did_you_mean, shown
from capt.pretrain.base.sensitive import has_secret, says_secret
from capt.pretrain.config.reader import MAX_DEPTH

_REFERENCE = re.compile(r"\\\$\{|\$\{([^${}]*)\}|\$\{")
# Beyond `capt.pretrain.base.sensitive`, which lets NCCL_IB_PKEY and the like travel: a reference is written into files.
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API|AUTH\w*|BEARER|COOKIE\w*|CREDS?|CREDENTIALS?|DSN|\w*KEYS?|\w+PWD|PASS\w*|PAT|PRIVATE|SAS|SECRETS?"
    r"|SESSION\w*|SIGNATURE|TOKENS?|WEBHOOK\w*)(?:_|\d|$)",
    re.IGNORECASE,
)
_WORKING_FOLDER = "PWD"
_MOST = 3_000_000
_VALUE = 100
_DEEPEST = 50


def interpolate(mapping: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return ``mapping`` with every ``${...}`` replaced; ``source`` names it in errors.

    Raises:
        ConfigError: a key or variable is not there, keys refer to one another in a circle, a variable's name or value
            looks like a secret, or the result is over three million characters.
    """
    result = _Interpolation(mapping, source).value(mapping, ())
    assert isinstance(result, dict)
    return result


class _Interpolation:
    def __init__(self, root: Mapping[str, Any], source: str) -> None:
        self._root, self._source = root, source
        self._left = _MOST
        self._depth = 0
        self._known: dict[str, tuple[Any, int]] = {}

    def value(self, node: Any, trail: tuple[str, ...]) -> Any:
        """Return ``node`` with its references replaced; ``trail`` are the keys whose values led here."""
        self._spend(_VALUE)
        if isinstance(node, Mapping | list):
            return self._collection(node, trail)
        return self._text(node, trail) if isinstance(node, str) and "${" in node else node

    def _collection(self, node: Mapping[str, Any] | list[Any], trail: tuple[str, ...]) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ConfigError(f"{self._source}: nested over {MAX_DEPTH} deep once every ${{...}} is replaced")
        if isinstance(node, list):
            value: Any = [self.value(inner, trail) for inner in node]
        else:
            value = {key: self.value(inner, trail) for key, inner in node.items()}
        self._depth -= 1
        return value

    def _text(self, text: str, trail: tuple[str, ...]) -> Any:
        # A reference that is the whole value keeps its type; within a text it becomes text.
        whole = _REFERENCE.fullmatch(text)
        if whole is not None and whole[1] is not None:
            return self._replacement(whole[1], trail)
        parts, at = [], 0
        for match in _REFERENCE.finditer(text):
            parts.append(text[at : match.start()])
            at = match.end()
            parts.append("${" if match[0].startswith("\\") else self._word(match, trail))
            self._spend(len(parts[-1]))
        return "".join([*parts, text[at:]])

    def _word(self, match: re.Match[str], trail: tuple[str, ...]) -> str:
        if match[1] is None:
            raise self._error(match[0], r"is not closed by }, or holds another ${; \${ is a plain ${")
        value = self._replacement(match[1], trail)
        if isinstance(value, Mapping | list):
            raise self._error(match[0], "is a section or a list, which cannot be part of a text")
        return str(value)

    def _replacement(self, name: str, trail: tuple[str, ...]) -> Any:
        resolver, colon, argument = name.partition(":")
        if not colon:
            return self._key(name.strip(), trail)
        if resolver.strip() != "oc.env":
            raise self._error(f"${{{name}}}", "is neither ${a.b} nor ${oc.env:NAME}")
        return self._variable(argument)

    def _key(self, key: str, trail: tuple[str, ...]) -> Any:
        # The trail of keys, and not a set of all: two keys may refer to the same third one.
        if key in trail:
            raise self._error(f"${{{key}}}", f"refers to itself: {' -> '.join((*trail, key)[-5:])}")
        if key not in self._known:
            # The cost of the value, which counts again wherever the value is used.
            before = self._left
            value = self.value(self._raw(key, (*trail, key)), (*trail, key))
            self._known[key] = value, before - self._left
            return value
        value, size = self._known[key]
        self._spend(size)  # ten keys that name one another twice are a thousand values
        return value

    def _raw(self, key: str, trail: tuple[str, ...]) -> Any:
        """The value of ``key``, its own references not yet replaced; keys on the way to it may be references."""
        if len(trail) > _DEEPEST:
            raise self._error(f"${{{key}}}", f"is the end of a chain of {_DEEPEST} references")
        node: Any = self._root
        # A section on the way may be a reference itself.
        for part in key.split("."):
            if isinstance(node, str) and "${" in node:
                node = self._text(node, trail)
            if isinstance(node, list) and part.isdecimal() and len(part) < 6 and int(part) < len(node):
                node = node[int(part)]
            elif isinstance(node, Mapping) and part in node:
                node = node[part]
            else:
                known = list(node) if isinstance(node, Mapping) else []
                raise self._error(
                    f"${{{key}}}", f"names no value: there is no {shown(part)}; {did_you_mean(part, known)}"
                )
        return node

    def _variable(self, argument: str) -> str:
        name, comma, default = argument.partition(",")
        name, default = name.strip(), default.strip()
        where = f"${{oc.env:{name}}}"
        # PWD is the working folder, and no password.
        if name != _WORKING_FOLDER and (_SECRET_NAME.search(name) or says_secret(name)):
            raise self._error(where, "looks like a secret; it would be written into the run and its model cards")
        value = os.environ.get(name) if name and "=" not in name and "\0" not in name else None
        if value is None and not comma:
            raise self._error(where, "is not set, and there is no default: ${oc.env:NAME,default}")
        if value is not None and has_secret(value):
            raise self._error(where, "holds what looks like a secret; it would be written into the run")
        return default if value is None else value

    def _spend(self, size: int) -> None:
        """Count characters, and a value as ``_VALUE`` of them."""
        self._left -= size
        if self._left < 0:
            raise ConfigError(f"{self._source}: over {_MOST:,} characters once every ${{...}} is replaced")

    def _error(self, what: str, text: str) -> ConfigError:
        return ConfigError(f"{self._source}: {shown(what)} {text}")

"""A pipeline file as a tree of plain values, with the line of every key: YAML, variables and overrides."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from firnline.config.secrets import is_inline_secret
from firnline.errors import SpecError
from firnline.spec.problems import KeyPath, Origin, Problem, spec_error
from firnline.spec.spark_keys import ALLOWED_KEYS

MAX_VALUES = 20_000  # more can only come from aliases that multiply

# Whether the key at a path takes a secret. Its value is text: `0123` and `1.10` stay as written.
TestOfKey: TypeAlias = Callable[[KeyPath], bool]

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
_REFERENCE_HINT = "Write ${NAME} or ${NAME:-default}; for a plain ${ write $${."
_HINT_FOR_SECRETS = "Write ${env:NAME} or ${file:PATH}, which are read when they are needed; for a plain ${ write $${."
_PLAIN_TAGS = frozenset(_TAG + t for t in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq"))
_REFERENCE = re.compile(r"\$\$\{|\$\{([^}]*)(\}?)")
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
_SECRET = re.compile(r"(env|file):(?!-).*", re.DOTALL)


@dataclass
class Tree:
    """The values of a file, the line of each key, and the problems of single values."""

    data: Any = None
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    inline_secrets: list[KeyPath] = field(default_factory=list)  # keys whose secret is written in the file


def parse_yaml(
    text: str,
    *,
    place: str,
    environ: Mapping[str, str],
    takes_secret: TestOfKey,
    knows_key: TestOfKey = lambda _path: True,
) -> Tree:
    """Return the values in a YAML text; problems with single values are collected, not raised.

    Args:
        text: The content of the file.
        place: The file's name for messages.
        environ: Where `${VAR}` is looked up.
        takes_secret: Which keys may hold a reference to a secret.
        knows_key: Which keys exist.

    Raises:
        SpecError: the text is not YAML.
    """
    try:
        yaml = YAML(typ="safe", pure=True)
        yaml.composer.warn_double_anchors = False
        root = yaml.compose(text)
        reader = _Reader(place, environ, takes_secret, knows_key)
        if root is not None:
            reader.tree.data = reader.read(root, ())
    except MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        raise _syntax_error(place, (mark.line + 1) if mark else 1, _syntax_words(exc), text) from None
    except YAMLError as exc:
        code = getattr(exc, "character", None)
        words = f"a character that YAML does not allow: {chr(code)!r}" if isinstance(code, int) else "unreadable"
        line = text.count("\n", 0, getattr(exc, "position", 0)) + 1
        raise _syntax_error(place, line, words, text) from None
    except RecursionError:
        raise _syntax_error(place, 1, "nested too deeply, or an alias that holds itself", text) from None
    reader.tree.origins.setdefault((), Origin(place, 1))
    return reader.tree


def parse_scalar(text: str) -> Any:
    """Return the value of an unquoted YAML scalar: null, a boolean, a number, or the text itself."""
    tag = str(_RESOLVER.resolve(ScalarNode, text, (True, False)))
    try:
        return _scalar_value(tag, text)
    except ValueError:
        return text


_RESOLVER = YAML(typ="safe", pure=True).resolver


def _scalar_value(tag: str, text: str) -> Any:
    if tag == _TAG + "null":
        return None
    if tag == _TAG + "bool":
        return text.lower() in ("true", "yes", "on")
    if tag == _TAG + "int":
        digits = text.replace("_", "")
        return int(digits, 0) if re.match(r"[-+]?0[xob]", digits) else int(digits)
    if tag == _TAG + "float":
        return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _syntax_words(exc: MarkedYAMLError) -> str:
    if "another document" in str(exc.problem):
        return "only one YAML document is allowed"
    return str(exc.problem or exc.context)


def _syntax_error(place: str, line: int, words: str, text: str) -> SpecError:
    lines = text.splitlines()
    culprit = lines[line - 1] if 0 < line <= len(lines) else ""
    hint = "Look at the indentation, the colons and the brackets near that line."
    if "\\t" in words:
        hint = "Indent with spaces; YAML allows no tabs there."
    elif re.search(r"[{,\[].*\$\{", culprit):
        hint = 'Inside { } and [ ] put references in quotes: "${NAME}".'
    return spec_error([Problem(Origin(place, line), (), f"not valid YAML: {words}", hint)], file=place)


def _text_line(node: Node) -> int | None:
    """Return the line at which the text of a literal block (`|`) begins: only there lines stay lines."""
    return node.start_mark.line + 2 if isinstance(node, ScalarNode) and node.style == "|" else None


class _Reader:
    """Walks the nodes of one file."""

    def __init__(self, place: str, environ: Mapping[str, str], takes_secret: TestOfKey, knows_key: TestOfKey) -> None:
        self.place = place
        self.environ = environ
        self.takes_secret = takes_secret
        self.knows_key = knows_key
        self.tree = Tree()
        self.count = 0

    def problem(self, node: Node, path: KeyPath, message: str, hint: str | None = None) -> None:
        origin = self.tree.origins.get(path) or Origin(self.place, node.start_mark.line + 1)
        self.tree.problems.append(Problem(origin, path, message, hint))

    def read(self, node: Node, path: KeyPath) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise RecursionError
        if str(node.tag) not in _PLAIN_TAGS:
            self.problem(node, path, f'the tag "{str(node.tag).replace(_TAG, "!!")}" is not allowed')
            return None
        if isinstance(node, MappingNode):
            return self.read_mapping(node, path)
        if isinstance(node, SequenceNode):
            return self.read_list(node, path)
        assert isinstance(node, ScalarNode)
        return self.read_scalar(node, path)

    def read_list(self, node: SequenceNode, path: KeyPath) -> list[Any]:
        for index, item in enumerate(node.value):
            self.tree.origins[(*path, index)] = Origin(self.place, item.start_mark.line + 1)
        return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]

    def read_mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if str(key_node.tag) == _MERGE:
                continue
            if not isinstance(key_node, ScalarNode):
                self.problem(key_node, path, "a key must be plain text, not a list or a mapping")
                continue
            key = str(key_node.value)
            at = (*path, key)
            if key in lines:
                message = f"the key is there twice (first on line {lines[key]})"
                self.tree.problems.append(Problem(Origin(self.place, line), at, message))
                continue
            lines[key] = line
            self.tree.origins[at] = Origin(self.place, line, _text_line(value_node))
            values[key] = self.read(value_node, at)
        for key_node, value_node in node.value:
            if str(key_node.tag) == _MERGE:
                self.merge(values, value_node, path)
        return values

    def merge(self, values: dict[str, Any], node: Node, path: KeyPath) -> None:
        """Add what `<<` brings; keys that are written out win, then the first mapping."""
        for part in node.value if isinstance(node, SequenceNode) else [node]:
            if not isinstance(part, MappingNode):
                self.problem(part, path, "<< takes a mapping or a list of mappings")
                continue
            rest = [(k, v) for k, v in part.value if str(k.value) not in values]
            values.update(self.read_mapping(MappingNode(part.tag, rest, part.start_mark, part.end_mark), path))

    def read_scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        text, plain = str(node.value), not node.style
        key = next((part for part in reversed(path) if isinstance(part, str)), "")
        if is_inline_secret(key, text, takes_secret=self.takes_secret(path)):
            self.tree.inline_secrets.append(path)
        filled = self.fill(node, text, path)
        if plain and str(node.tag) == _TAG + "null":
            return None
        if not plain or self.takes_secret(path):
            return filled
        return parse_scalar(filled) if filled != text else self.resolved(node, text)

    def resolved(self, node: Node, text: str) -> Any:
        try:
            return _scalar_value(str(node.tag), text)
        except ValueError:
            return text

    def fill(self, node: Node, text: str, path: KeyPath) -> str:
        """Replace `${VAR}` and `${VAR:-default}`; `$${` is a literal `${`. References to secrets stay."""

        def replace(match: re.Match[str]) -> str:
            if match.group(0) == "$${":
                return "${"
            inner, end = match.group(1), match.group(2)
            if end and _SECRET.fullmatch(inner):
                # A key that does not exist is reported as such: it may be a misspelt one that takes a secret.
                if self.knows_key(path) and not self.takes_secret(path):
                    self.problem(
                        node,
                        path,
                        f'"{match.group(0)}" refers to a secret, and this key takes none',
                        _plain_hint(inner),
                    )
                return match.group(0)
            variable = _VARIABLE.fullmatch(inner) if end and "${" not in inner else None
            if variable is None:
                hint = _HINT_FOR_SECRETS if self.takes_secret(path) else _REFERENCE_HINT
                self.problem(node, path, f'"{match.group(0)}" is not a reference', hint)
                return ""
            name, default = variable.group(1), variable.group(2)
            value = self.environ.get(name)
            if value is None and default is None:
                hint = f"Set it, e.g. `export {name}=...`, or write ${{{name}:-default}}."
                self.problem(node, path, f"environment variable {name} is not set", hint)
            return value or default or ""

        return _REFERENCE.sub(replace, text)


def _plain_hint(reference: str) -> str:
    """Return what to write where a reference to a secret is not allowed."""
    kind, _, name = reference.partition(":")
    if kind == "env" and _VARIABLE.fullmatch(name):
        return f"Write ${{{name}}}: the variable is read with the spec, and its value is shown."
    return "Write the value itself, or ${NAME} for an environment variable."


PREFIX = "FIRNLINE__"


def apply_overrides(tree: Tree, environ: Mapping[str, str], takes_secret: TestOfKey) -> None:
    """Write every override into the tree, with its variable as the origin.

    Two underscores lead one level down. Keys match without regard to case, and any sign in a key matches
    an underscore, so that `FIRNLINE__SPARK__SPARK_MASTER` reaches `spark.master`. A number picks an item of a
    list; the number after the last adds one. Values are YAML scalars.
    """
    for variable in sorted(environ):
        if variable.startswith(PREFIX):
            _apply(tree, variable, environ[variable], takes_secret)


def _apply(tree: Tree, variable: str, text: str, takes_secret: TestOfKey) -> None:
    parts = variable[len(PREFIX) :].split("__")
    origin = Origin(variable)
    if not all(parts):
        tree.problems.append(Problem(origin, (), "not a key path (two underscores lead one level down)"))
        return
    if tree.data is None:
        tree.data = {}
    at: Any = tree.data
    path: KeyPath = ()
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        key, problem = _step(at, path, part)
        if problem is not None:
            tree.problems.append(Problem(origin, path, problem))
            return
        path = (*path, key)
        if last:
            _store(at, key, text if takes_secret(path) else parse_scalar(text))
            _forget_below(tree, path)
            tree.origins[path] = origin
        else:
            at = _descend(at, key, _is_index(parts[depth + 1]))
            tree.origins.setdefault(path, origin)


def _forget_below(tree: Tree, path: KeyPath) -> None:
    """Drop the recorded lines and problems of the value that is replaced."""
    for known in [p for p in tree.origins if p[: len(path)] == path]:
        del tree.origins[known]
    tree.problems[:] = [p for p in tree.problems if p.path[: len(path)] != path or p.path == ()]
    tree.inline_secrets[:] = [known for known in tree.inline_secrets if known[: len(path)] != path]


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdigit()


def _step(at: Any, path: KeyPath, part: str) -> tuple[str | int, str | None]:
    """Return the key or index that `part` means below `at`, or what is wrong with it."""
    if isinstance(at, list):
        if not _is_index(part):
            return part, f'a list is reached by number, not by "{part.lower()}"'
        index = int(part)
        return index, None if index <= len(at) else f"has {len(at)} items; {index} is too high"
    if not isinstance(at, dict):
        return part, f'holds a single value; "{part.lower()}" cannot be set below it'
    found = _matches(part, at)
    if len(found) > 1:
        return part, f"{part} could mean {' or '.join(found)}"
    if not found and path[-1:] == ("spark",):
        found = _matches(part, ALLOWED_KEYS) or [part.lower().replace("_", ".")]
    return (found[0] if found else part.lower()), None


def _matches(part: str, keys: Iterable[str]) -> list[str]:
    keys = list(keys)
    return [part] if part in keys else [key for key in keys if _loose(key) == _loose(part)]


def _loose(key: str) -> str:
    return re.sub(r"[^a-z0-9]", "_", key.lower())


def _store(at: Any, key: str | int, value: Any) -> None:
    if isinstance(at, list) and key == len(at):
        at.append(value)
    else:
        at[key] = value


def _descend(at: Any, key: str | int, by_index: bool) -> Any:
    """Return the value below a key, created if it is missing or empty: a list if a number comes next."""
    inner = at[key] if (isinstance(at, dict) and key in at) or (isinstance(key, int) and key < len(at)) else None
    if inner is None:
        inner = [] if by_index else {}
        _store(at, key, inner)
    return inner

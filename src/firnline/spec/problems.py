"""Problems of a spec as messages: where it is, what is wrong, and what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel, SecretStr, Tag, ValidationError

from firnline.config.fields import Config
from firnline.errors import SpecError

KeyPath = tuple[str | int, ...]

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_NOT_SHOWN = "what it holds"  # instead of a secret
_LONGEST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written: a line of a file, or an environment variable.

    `text_line` is the line at which a text of several lines begins, where these are lines of the file too.
    """

    place: str
    line: int | None = None
    text_line: int | None = None

    def at(self, line: int | None) -> Origin:
        """Return the origin of one line of the text, or of the whole value when that is unknown."""
        return self if line is None or self.text_line is None else Origin(self.place, self.text_line + line - 1)

    def __str__(self) -> str:
        return self.place if self.line is None else f"{self.place}:{self.line}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    origin: Origin
    path: KeyPath
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        where = f"{self.origin}: {key_path_text(self.path)}" if self.path else str(self.origin)
        return f"{where}: {self.message}"


def key_path_text(path: KeyPath) -> str:
    """Return a key path as people write it, e.g. `sinks[0].table` or `spark["spark.master"]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_KEY.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f'["{part}"]'
    return text


CHECK_HINT = "Correct it and run again; `firnline dry-run` checks a spec without writing."


def spec_error(problems: Sequence[Problem], *, file: str | None = None, hint: str = CHECK_HINT) -> SpecError:
    """Return one error that lists all problems, in the order of the file; its hint is that of the first, or `hint`."""
    ordered = sorted(dict.fromkeys(problems), key=lambda p: (p.origin.line is None, p.origin.line or 0))
    first = ordered[0]
    return SpecError(
        "\n".join(str(problem) for problem in ordered),
        hint=first.hint or hint,
        file=file,
        line=first.origin.line,
        key=key_path_text(first.path),
        problems=[str(problem) for problem in ordered],
    )


def problems_of(error: ValidationError, origins: Mapping[KeyPath, Origin], root: type[BaseModel]) -> list[Problem]:
    """Return our own messages for the errors of pydantic."""
    details = [dict(detail) for detail in error.errors(include_url=False)]
    problems = []
    for detail in details:
        if not _is_echo(detail, details, root):
            path, message, hint = translate(detail, root)
            problems.append(Problem(origin_of(path, origins), path, message, hint))
    return problems


def _is_echo(detail: dict[str, Any], details: Iterable[dict[str, Any]], root: type[BaseModel]) -> bool:
    """Whether an error only follows from another one in the list, which is reported instead."""
    loc, kind = detail["loc"], detail["type"]
    for other in details:
        there = other["loc"]
        if other is detail:
            continue
        if kind == "too_short" and there[: len(loc)] == loc:
            return True  # an entry is there, but wrong
        if there[:-1] != loc[:-1]:
            continue
        if there[-1] == "type" and other["type"] == "literal_error":
            return True  # under a wrong type every key looks wrong
        if kind == "missing" and other["type"] == "extra_forbidden" and _guess(there, root) == loc[-1]:
            return True  # it is there, but misspelt
    return False


def origin_of(path: KeyPath, origins: Mapping[KeyPath, Origin]) -> Origin:
    """Return where this key, or else the nearest enclosing section, was written."""
    for length in range(len(path), -1, -1):
        found = origins.get(path[:length])
        if found is not None:
            return found
    return Origin("spec")


def translate(detail: dict[str, Any], root: type[BaseModel]) -> tuple[KeyPath, str, str | None]:
    """Return key path, message and hint for one of pydantic's error details."""
    kind, loc, context = detail["type"], detail["loc"], detail.get("ctx") or {}
    loc = loc[:-1] if loc and loc[-1] == "[key]" else loc
    path = _without_tags(loc, root)
    if kind == "spec":
        return (*path, *context["at"]), context["message"], context["hint"]
    if kind == "extra_forbidden":
        return path, *_unknown_key(loc, root)
    if kind == "missing":
        return path, "missing", f"Add `{path[-1]}: ...` to {key_path_text(path[:-1]) or 'the file'}."
    if kind == "literal_error":
        return path, *_unknown_word(path, detail["input"], _words_at(loc, root))
    shown = _NOT_SHOWN if takes_secret(path, root) else _shown(detail["input"])
    if kind == "string_pattern_mismatch":
        return path, f'{shown} is not a valid name (letters, digits, "_", ".", "-"; a letter or digit first)', None
    words = _WORDS.get(_family(kind))
    as_list = f" (write [{detail['input']}])" if isinstance(detail["input"], str) and shown != _NOT_SHOWN else ""
    return path, words.format(shown=shown, as_list=as_list, **context) if words else str(detail["msg"]), None


_WORDS = {
    "int": "must be a whole number, not {shown}",
    "float": "must be a number, not {shown}",
    "finite": "must be a finite number",
    "bool": "must be true or false, not {shown}",
    "string": "must be text, not {shown} (put it in quotes)",
    "model": "must be a mapping (key: value), not {shown}",
    "dict": "must be a mapping (key: value), not {shown}",
    "tuple": "must be a list, not {shown}{as_list}",
    "greater_than_equal": "must be at least {ge:.15g}, not {shown}",
    "greater_than": "must be more than {gt:.15g}, not {shown}",
    "less_than_equal": "must be at most {le:.15g}, not {shown}",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}


def _family(kind: str) -> str:
    if kind in _WORDS:
        return kind
    return kind.split("_", 1)[0]


def _shown(value: object) -> str:
    if isinstance(value, SecretStr):
        return _NOT_SHOWN
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _unknown_key(path: KeyPath, root: type[BaseModel]) -> tuple[str, str | None]:
    key, model = str(path[-1]), _model_at(path[:-1], root)
    here = next((home for home, other in _all_models(root) if other is model), "")
    homes = [home for home, other in _all_models(root) if key in _keys(other) and home != here]
    homes = [home for home in homes if here and home.startswith(f"{here}.")] or homes  # a part of this one, if any
    if len(homes) == 1 and key not in _other_words(model):
        return f"unknown key here (it belongs in {homes[0]})", f"Move `{key}` to {homes[0]}."
    guess = _guess(path, root)
    if guess is not None:
        return f'unknown key (did you mean "{guess}"?)', f"Write `{guess}` instead of `{key}`."
    return f"unknown key (known: {', '.join(_keys(model))})", None


def _guess(path: KeyPath, root: type[BaseModel]) -> str | None:
    """Return the key that was probably meant by an unknown one."""
    key, model = str(path[-1]), _model_at(path[:-1], root)
    return _other_words(model).get(key) or _closest(key, _keys(model))


def _other_words(model: type[BaseModel]) -> Mapping[str, str]:
    return model.other_words if issubclass(model, Config) else {}


def unknown_type(value: object, known: Sequence[str]) -> str:
    """Return the message about a `type` or `format` that does not exist."""
    guess = _closest(value, known) if isinstance(value, str) else None
    meant = f'; did you mean "{guess}"?' if guess else ""
    return f"{_shown(value)} is not in this version (known: {', '.join(known)}{meant})"


def _unknown_word(path: KeyPath, value: object, words: Sequence[str]) -> tuple[str, str | None]:
    if path[-1] in ("type", "format"):
        return unknown_type(value, words), None
    shown = _shown(value)
    guess = _closest(value, words) if isinstance(value, str) else None
    if guess is not None:
        return f'must be one of {", ".join(words)}, not {shown} (did you mean "{guess}"?)', None
    return f"must be one of {', '.join(words)}, not {shown}", None


def _closest(word: str, words: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(word.lower().replace("-", "_"), list(words), n=1, cutoff=0.6)
    return found[0] if found else None


def takes_secret(path: KeyPath, annotation: Any) -> bool:
    """Whether a value at this path, from a model or a field's type, is a secret or holds some."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return bool(path) and takes_secret(path[1:], _keys(annotation).get(str(path[0])))
    if get_origin(annotation) in (dict, tuple):
        entry = get_args(annotation)[1 if get_origin(annotation) is dict else 0]
        return takes_secret(path[1:], entry)
    return annotation is SecretStr or any(takes_secret(path, part) for part in get_args(annotation))


def knows_key(path: KeyPath, annotation: Any) -> bool:
    """Whether a model, or one of several, has the key at this path."""
    if not path:
        return True
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        found = _keys(annotation).get(str(path[0]))
        return found is not None and knows_key(path[1:], found)
    if get_origin(annotation) in (dict, tuple):
        return knows_key(path[1:], get_args(annotation)[1 if get_origin(annotation) is dict else 0])
    return annotation is Any or any(knows_key(path, part) for part in get_args(annotation))


# --- the tree of models ----------------------------------------------------------------------------------


def _keys(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model that an annotation holds: itself, or that of a mapping's values or a list's items."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _inner_model(part))), None)


def _model_at(path: KeyPath, root: type[BaseModel]) -> type[BaseModel]:
    model, rest = root, list(path)
    while rest:
        annotation = _keys(model).get(str(rest.pop(0)))
        if get_origin(annotation) in (dict, tuple) and rest:
            rest.pop(0)  # the name or number of an entry
        tagged = _tagged(annotation)
        model = tagged[str(rest.pop(0))] if rest and rest[0] in tagged else _inner_model(annotation) or model
    return model


def _tagged(annotation: Any) -> dict[str, type[BaseModel]]:
    """Return the models among which a tag chooses; pydantic puts the tag into its paths."""
    found: dict[str, type[BaseModel]] = {}
    for part in get_args(annotation):
        tag = next((m.tag for m in getattr(part, "__metadata__", ()) if isinstance(m, Tag)), None)
        found.update({tag: part.__origin__} if tag is not None else _tagged(part))
    return found


def _without_tags(loc: KeyPath, root: type[BaseModel]) -> KeyPath:
    """Return the path as it is in the file."""
    kept: list[str | int] = []
    for place, part in enumerate(loc):
        if place >= 2 and part in _tagged(_keys(_model_at(loc[: place - 2], root)).get(str(loc[place - 2]))):
            continue
        kept.append(part)
    return tuple(kept)


def _words_at(path: KeyPath, root: type[BaseModel]) -> tuple[str, ...]:
    """Return the words that a key takes, or an entry of a mapping or a list."""
    several = _keys(_model_at(path[:-2], root)).get(str(path[-2])) if len(path) > 1 else None
    if get_origin(several) in (dict, tuple):
        return get_args(get_args(several)[1 if get_origin(several) is dict else 0])
    return get_args(_keys(_model_at(path[:-1], root))[str(path[-1])])


def _all_models(model: type[BaseModel], home: str = "") -> Iterable[tuple[str, type[BaseModel]]]:
    yield home or "the top level", model
    for key, annotation in _keys(model).items():
        inner = _inner_model(annotation)
        kind = get_origin(annotation)
        entry = ".<name>" if kind is dict else "[]" if kind is tuple else ""
        for nested in _tagged(annotation).values() or ([inner] if inner is not None else []):
            yield from _all_models(nested, f"{home}.{key}{entry}" if home else f"{key}{entry}")

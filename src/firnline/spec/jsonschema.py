"""The JSON Schema of a pipeline file, for editors; made from the same models that check it."""

from __future__ import annotations

from typing import Any

from firnline.spec.models import PipelineSpec

__all__ = ["json_schema"]

_VARIABLE = {"type": "string", "pattern": r"\$\{[^}]+\}"}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12). Numbers and booleans may also be written as `${NAME}`."""
    schema = PipelineSpec.model_json_schema(by_alias=True, mode="validation")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_with_variables(schema),
        "title": "Firnline pipeline",
    }


def _with_variables(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_variables(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _with_variables(item) for key, item in value.items() if key != "title" or not isinstance(item, str)}
    if kept.get("type") not in ("integer", "number", "boolean"):
        return kept
    typed = {key: kept.pop(key) for key in ("type", *_BOUNDS) if key in kept}
    return {**kept, "anyOf": [typed, _VARIABLE]}

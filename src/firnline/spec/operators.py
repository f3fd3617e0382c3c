"""The operators of a pipeline file: one model per type."""

from __future__ import annotations

import difflib
import json
import re
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from firnline.config.fields import (
    ColumnName,
    Config,
    Count,
    Duration,
    Flag,
    Millis,
    Name,
    differ,
    fail,
    location,
    micros,
)
from firnline.types import Json

__all__ = [
    "AggregateConfig",
    "AggregateOperatorConfig",
    "CorrelateOperatorConfig",
    "DeduplicateOperatorConfig",
    "OperatorConfig",
    "OwnOperatorConfig",
    "SqlOperatorConfig",
    "WindowConfig",
]

BUILT_IN = ("sql", "aggregate", "deduplicate", "correlate")
OWN = "own"  # the tag of module:Class
EMPTY_STATE = "empty"
ADDED_COLUMNS = ("window_start", "window_end", "_op", "_sequence", "_before")
_OWN_TYPE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def _plain_name(value: str) -> str:
    if "." in value:
        raise fail(f'"{value}" must hold no dot: what follows one names a port, as in totals.late')
    return value


def _initial_state(value: str, info: ValidationInfo) -> str:
    return value if value == EMPTY_STATE else location(value, info)


OperatorName = Annotated[Name, AfterValidator(_plain_name)]
Keys = Annotated[tuple[ColumnName, ...], AfterValidator(lambda keys: differ(keys, "column"))]


class OperatorConfig(Config, ABC):
    """Keys that all operators share."""

    other_words: ClassVar[dict[str, str]] = {"input": "inputs", "from": "inputs", "sources": "inputs"}
    ports: ClassVar[tuple[str, ...] | None] = ()  # beside the main port; None: only the class itself knows
    gives_changes: ClassVar[bool | None] = False  # whether its rows are a changelog; None: it depends

    name: OperatorName = Field(description="Unique name among sources, operators and sinks; no dots.")
    type: str = Field(description="sql, aggregate, deduplicate, correlate, or your own class as module:Class.")
    inputs: tuple[str, ...] = Field(
        min_length=1, description="The inputs: sources, operators, or late rows as NAME.late."
    )

    @field_validator("inputs")
    @classmethod
    def _inputsdiffer(cls, inputs: tuple[str, ...]) -> tuple[str, ...]:
        return differ(inputs, "input")

    @abstractmethod
    def settings_json(self) -> dict[str, Json]:
        """Return the settings that are sent to workers; settings that were not given are absent."""


class SqlOperatorConfig(OperatorConfig):
    """A query that Spark runs over the rows of each epoch."""

    other_words: ClassVar[dict[str, str]] = {**OperatorConfig.other_words, "sql": "query", "select": "query"}
    gives_changes: ClassVar[bool | None] = None

    type: Literal["sql"] = Field(description="Kind of operator.")
    query: str = Field(
        min_length=1,
        description="One SELECT over the inputs, by name. Use epoch_time() instead of the clock; functions whose "
        "result would differ on a replay are refused.",
    )

    def settings_json(self) -> dict[str, Json]:
        return {"query": self.query}


class StatefulOperatorConfig(OperatorConfig):
    """Keys that all stateful operators share."""

    interval_ms: Millis | None = Field(
        default=None,
        description="With checkpoint.mode: per_operator, milliseconds between two snapshots; null means every epoch.",
    )
    initial_state: Annotated[str, AfterValidator(_initial_state)] = Field(
        default="",
        description="An exported state to start from if the operator has none; relative to this file. The word empty "
        "starts a new operator without state in a pipeline that has history.",
    )
    renamed_from: str = Field(
        default="", description="The operator's former name, under which checkpoints hold its state."
    )
    idle_after: Duration | None = Field(
        default=None,
        description="An input without rows for this long, e.g. 10m, no longer holds the watermark back; its later rows "
        "may then be late. null waits for every input forever.",
    )


class AggregateConfig(Config):
    """One column of an aggregate."""

    other_words: ClassVar[dict[str, str]] = {"as": "name", "alias": "name", "func": "function", "of": "column"}

    name: ColumnName = Field(description="Name of the output column.")
    function: Literal["count", "sum", "min", "max", "avg", "first", "last"] = Field(
        description="count, sum, min, max, avg, first or last."
    )
    column: ColumnName | None = Field(default=None, description="Input column; count without a column counts rows.")
    order_by: ColumnName | None = Field(
        default=None, description="first and last: the column that orders the rows; by default the time column."
    )

    @model_validator(mode="after")
    def _fits_its_function(self) -> AggregateConfig:
        if self.column is None and self.function != "count":
            raise fail(f"function: {self.function} needs it", "column")
        if self.order_by is not None and self.function not in ("first", "last"):
            raise fail(f"is for function: first or last, not {self.function}", "order_by")
        return self


class WindowConfig(Config):
    """Event-time windows."""

    size: Duration = Field(description="Length of a window, e.g. 10m.")
    slide: Duration | None = Field(
        default=None, description="Distance between window starts, e.g. 5m; by default windows do not overlap."
    )

    @model_validator(mode="after")
    def _no_gaps(self) -> WindowConfig:
        if self.slide is not None and self.slide > self.size:
            raise fail("must be at most size: rows between two windows would be lost", "slide")
        return self

    def to_json(self) -> dict[str, Json]:
        found: dict[str, Json] = {"size_us": micros(self.size)}
        return found if self.slide is None else {**found, "slide_us": micros(self.slide)}


class AggregateOperatorConfig(StatefulOperatorConfig):
    """Counts, sums and other aggregates per key and window, over all epochs."""

    other_words: ClassVar[dict[str, str]] = {**OperatorConfig.other_words, "group_by": "keys", "key": "keys"}
    ports: ClassVar[tuple[str, ...] | None] = ("late",)
    gives_changes: ClassVar[bool | None] = True

    type: Literal["aggregate"] = Field(description="Kind of operator.")
    keys: Keys = Field(default=(), description="Columns to group by; empty means one global total.")
    aggregates: tuple[AggregateConfig, ...] = Field(min_length=1, description="The columns to compute.")
    time: ColumnName | None = Field(default=None, description="The event-time column.")
    window: WindowConfig | None = Field(
        default=None, description="Event-time window; omit it for one aggregate over all time."
    )
    delay: Duration | None = Field(
        default=None, description="How long to wait for out-of-order rows, e.g. 30s; no delay by default."
    )
    emit: Literal["changes", "final"] = Field(
        default="changes",
        description="changes emits a row in every epoch that changes it; final emits each window once, when it closes.",
    )
    before: Flag = Field(default=False, description="Add the column _before: the row before the change.")

    @field_validator("aggregates")
    @classmethod
    def _namesdiffer(cls, aggregates: tuple[AggregateConfig, ...]) -> tuple[AggregateConfig, ...]:
        for index, one in enumerate(aggregates):
            if one.name.lower() in (other.name.lower() for other in aggregates[:index]):
                raise fail(f'two aggregates have the name "{one.name}"', index, "name")
        return aggregates

    @model_validator(mode="after")
    def _fits_together(self) -> AggregateOperatorConfig:
        taken = {key.lower(): "a key has this name" for key in self.keys}
        for index, key in enumerate(self.keys):
            if key.lower() in ADDED_COLUMNS:
                raise fail(f'"{key}" cannot be a key: the operator adds a column of this name', "keys", index)
        for index, one in enumerate(self.aggregates):
            at = ("aggregates", index, "name")
            if one.name.lower() in taken:
                raise fail(f'"{one.name}" is taken: {taken[one.name.lower()]}', *at)
            if one.name.lower() in ADDED_COLUMNS:
                raise fail(f'"{one.name}" is taken: the operator adds a column of this name', *at)
            if one.function in ("first", "last") and one.order_by is None and self.time is None:
                raise fail(f"function: {one.function} needs it, or `time`", "aggregates", index, "order_by")
        _need_time(self, "window", "delay", "idle_after")
        if self.emit == "final" and self.window is None:
            raise fail("final needs a window: without a window no row is ever final", "emit")
        if self.emit == "final" and self.before:
            raise fail("has no meaning with emit: final, which emits every row once", "before")
        return self

    def settings_json(self) -> dict[str, Json]:
        found = _given(self, "keys", "time", "delay", "emit", "before")
        found["aggregates"] = [one.model_dump(exclude_none=True) for one in self.aggregates]
        return found if self.window is None else {**found, "window": self.window.to_json()}


class DeduplicateOperatorConfig(StatefulOperatorConfig):
    """The first row of every key; later rows with the same key are dropped."""

    other_words: ClassVar[dict[str, str]] = {**OperatorConfig.other_words, "key": "keys", "by": "keys"}

    type: Literal["deduplicate"] = Field(description="Kind of operator.")
    keys: Keys = Field(min_length=1, description="Columns that identify a duplicate.")
    time: ColumnName | None = Field(default=None, description="The event-time column.")
    ttl: Duration | None = Field(
        default=None, description="Forget a key this long after its event time, e.g. 1h; never by default."
    )
    delay: Duration | None = Field(
        default=None, description="How long to wait for out-of-order rows, e.g. 30s; no delay by default."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> DeduplicateOperatorConfig:
        _need_time(self, "ttl", "delay", "idle_after")
        return self

    def settings_json(self) -> dict[str, Json]:
        return _given(self, "keys", "time", "ttl", "delay")


class CorrelateOperatorConfig(StatefulOperatorConfig):
    """Alerts when several inputs have rows with the same key, close to each other in event time."""

    other_words: ClassVar[dict[str, str]] = {**OperatorConfig.other_words, "key": "keys", "within": "window"}
    ports: ClassVar[tuple[str, ...] | None] = ("late",)
    gives_changes: ClassVar[bool | None] = True

    type: Literal["correlate"] = Field(description="Kind of operator.")
    keys: Keys = Field(min_length=1, description="Columns to match rows by, the same in every input.")
    time: ColumnName = Field(description="The event-time column, the same in every input.")
    window: Duration = Field(description="Maximum distance in event time between the rows of an alert, e.g. 30s.")
    min_inputs: Count | None = Field(
        default=None, description="Number of inputs that must have rows; by default all of them."
    )
    delay: Duration | None = Field(
        default=None, description="How long to wait for out-of-order rows, e.g. 30s; no delay by default."
    )
    retain: Duration | None = Field(
        default=None, description="How far behind the watermark a row may still change alerts, e.g. 1h; 0 by default."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> CorrelateOperatorConfig:
        count = len(self.inputs)
        if count < 2:
            raise fail("must name at least two: one input has nothing to be correlated with", "inputs")
        if self.min_inputs is not None and self.min_inputs > count:
            raise fail(f"must be at most the number of inputs ({count}), not {self.min_inputs}", "min_inputs")
        return self

    def settings_json(self) -> dict[str, Json]:
        return _given(self, "keys", "time", "window", "min_inputs", "delay", "retain")


class OwnOperatorConfig(StatefulOperatorConfig):
    """A class of your own, from the folder `operators` beside this file."""

    ports: ClassVar[tuple[str, ...] | None] = None
    gives_changes: ClassVar[bool | None] = None

    type: Annotated[str, WithJsonSchema({"type": "string", "pattern": f"^{_OWN_TYPE.pattern}$"})] = Field(
        description="The class, as module:Class; the module is a file in the folder `operators` beside this file."
    )
    settings: dict[str, Any] = Field(default={}, description="Settings passed to the class, which checks them itself.")

    @field_validator("type")
    @classmethod
    def _is_a_class(cls, value: str) -> str:
        if not _OWN_TYPE.fullmatch(value):
            raise fail(f'"{value}" must name a class as module:Class, e.g. sessions:Sessionise')
        return value

    @field_validator("settings")
    @classmethod
    def _is_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise fail("must be plain values: text, numbers, true or false, lists and mappings") from None
        return value

    def settings_json(self) -> dict[str, Json]:
        return dict(self.settings)


def _need_time(config: AggregateOperatorConfig | DeduplicateOperatorConfig, *keys: str) -> None:
    for key in keys:
        if config.time is None and getattr(config, key) is not None:
            raise fail("needs `time`, the event-time column", key)


def _given(config: OperatorConfig, *names: str) -> dict[str, Json]:
    """Return the settings that were given; durations become `<name>_us`."""
    found: dict[str, Json] = {}
    for name, value in config.model_dump(include=set(names) & (config.model_fields_set | {"keys"})).items():
        if name == "keys":
            found[name] = list(value)
        elif hasattr(value, "total_seconds"):
            found[f"{name}_us"] = micros(value)
        elif value is not None:
            found[name] = value
    return found


def _check_type(value: Any) -> Any:
    """Check the type first: under a wrong type, every key looks wrong."""
    if isinstance(value, OperatorConfig):
        return value
    if not isinstance(value, dict):
        raise fail("must be a mapping (key: value) with name, type and inputs")
    kind = value.get("type")
    if kind is None:
        raise fail("missing", "type", hint=f"Add `type: ...`: {', '.join(BUILT_IN)}, or your own as module:Class.")
    if not isinstance(kind, str) or (kind not in BUILT_IN and ":" not in kind):
        close = difflib.get_close_matches(str(kind).lower(), BUILT_IN, n=1)
        guess = f'; did you mean "{close[0]}"?' if close else ""
        raise fail(f'"{kind}" is not in this version (known: {", ".join(BUILT_IN)}, or module:Class{guess})', "type")
    return value


def _tag_of(value: Any) -> str:
    kind = value.type if isinstance(value, OperatorConfig) else value["type"]
    return kind if kind in BUILT_IN else OWN


AnyOperatorConfig = Annotated[
    Annotated[SqlOperatorConfig, Tag("sql")]
    | Annotated[AggregateOperatorConfig, Tag("aggregate")]
    | Annotated[DeduplicateOperatorConfig, Tag("deduplicate")]
    | Annotated[CorrelateOperatorConfig, Tag("correlate")]
    | Annotated[OwnOperatorConfig, Tag(OWN)],
    Discriminator(_tag_of),
    BeforeValidator(_check_type),
]

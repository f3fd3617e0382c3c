"""The keys that every kind of sink has in a spec. The model of a kind adds its own."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from firnline.config.fields import ColumnName, Config, Endpoint, Flag, Name, ReadSecret, differ, fail
from firnline.errors import ConfigError
from firnline.options import MISSING, OP, FollowerOptions, SinkOptions

OptionsClass: TypeAlias = type[SinkOptions]


class SinkConfig(Config, ABC):
    """A sink. The model of a kind defines `type`, a `Literal` with the name of the kind, and names its options class.

    Every other key of the model is a field of the options class with the same name.
    """

    options_class: ClassVar[OptionsClass]
    upserts_records: ClassVar[bool] = False  # whether `write: upsert` takes the records of a source, too

    type: str = Field(description="Kind of sink.")
    name: Name | None = Field(
        default=None, description="Unique name, stored in checkpoints; default: type and number, e.g. delta-1."
    )
    input: str = Field(
        default="",
        description="The source or operator to write, or late rows as NAME.late, or a captured table as NAME.TABLE; "
        "may be omitted if there is only one candidate.",
    )
    write: Literal["append", "upsert"] = Field(
        default="append",
        description="append adds rows; upsert keeps one row per key: it applies the changes of an operator, or "
        "the records of a source.",
    )
    key: tuple[ColumnName, ...] = Field(
        default=(),
        description="Upsert: the columns that identify a row; by default those of the operator, or of the "
        "captured table. Other sources need them.",
    )
    required: Flag = Field(
        default=True,
        description="Whether the checkpoint waits for this sink. Rows of an optional sink (false) wait in the "
        "pipeline's outbox, so that its outage does not stop the pipeline.",
    )

    @field_validator("key")
    @classmethod
    def _key_columns_differ(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        return differ(columns, "column")

    @model_validator(mode="after")
    def _key_fits_write(self) -> Self:
        if self.write == "append" and self.key:
            raise fail("only with write: upsert (here it is append)", "key")
        return self

    @property
    def endpoint(self) -> Endpoint | None:
        """Where the sink writes; no other sink may write there. None: nothing to compare with other sinks."""
        return None

    def may_write_to(self, location: str) -> bool:
        """Whether a sink with a template may write to the endpoint of another sink."""
        return False

    @property
    def takes_tables(self) -> bool:
        """Whether the sink can read all tables of a captured database at once (`input: shop.*`)."""
        return False

    @property
    def can_decide(self) -> bool:
        """Whether a sink of this kind can decide: its options say where the pipeline's home is then."""
        return self.options_class.home is not SinkOptions.home

    @property
    def is_staged(self) -> bool:
        """Whether another process commits what this sink stages."""
        return False

    def check_behind(self, deciding: SinkConfig) -> None:
        """Raise an error of `fail` if the sink cannot follow this deciding sink."""
        if deciding.is_staged:
            raise fail("cannot follow a staged sink", hint="List this sink first, or set `mode: direct` on the first.")

    def build(self, input_name: str, read_secret: ReadSecret) -> SinkOptions:
        """Return the options of the sink; `input_name` is the input that it has or that it gets by default."""
        values = {key: value for key, value in self.plain(read_secret).items() if key != "type"}
        return self.options_class(**{**values, "input": input_name})


def _texts(value: Any) -> Any:
    """Return values that mark a delete as a list of texts: `D`, `[D, 4]`, `true`."""
    values = value if isinstance(value, list | tuple) else [value]
    return [str(one).lower() if isinstance(one, bool) else str(one) if isinstance(one, int) else one for one in values]


_SCALAR = {"type": ["string", "integer", "boolean"]}
DeleteValues = Annotated[
    tuple[str, ...],
    Field(min_length=1),
    BeforeValidator(_texts),
    WithJsonSchema({"anyOf": [_SCALAR, {"type": "array", "items": _SCALAR, "minItems": 1}]}),
]


class RecordsConfig(SinkConfig, ABC):
    """A sink whose upserts take the records of a source, too."""

    upserts_records = True

    sequence_by: ColumnName | None = Field(
        default=None,
        description="Upsert of a source: the column that orders the rows of one key, e.g. updated_at; without it, the "
        "later row counts.",
    )
    delete_when: dict[ColumnName, DeleteValues] = Field(
        default={},
        description="Upsert of a source: column and value of the records that delete their key, e.g. {op: D}.",
    )

    @model_validator(mode="after")
    def _records_fit_write(self) -> Self:
        for name in ("sequence_by", "delete_when"):
            if getattr(self, name) and self.write != "upsert":
                raise fail("only with write: upsert (here it is append)", name)
        return self


def check_template(text: str) -> None:
    """Refuse a name whose braces name no column."""
    if re.search(r"\{\}|\{[^}]*$|^[^{]*\}|\{[^}]*\{|\}[^{]*\}", text):
        raise fail(f'"{text}" is no template (write {{column}} for the value of a column)')


def check_pattern(pattern: str) -> str:
    """Return a regular expression; refuse one that is none."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise fail(f"is no regular expression: {error}") from None
    return pattern


class DeliveryConfig(SinkConfig, ABC):
    """The keys of a sink that is delivered from the outbox, after a Delta table or the journal has decided."""

    columns: tuple[ColumnName, ...] = Field(default=(), description="The only columns to deliver; by default all.")
    exclude: tuple[str, ...] = Field(default=(), description="Columns that are not delivered.")
    mask: dict[str, Literal["hash", "redact", "null"]] = Field(
        default={},
        description="Columns whose values are masked: hash (SHA-256 of the text), redact (***) or null.",
    )
    where: str = Field(
        default="", description="Deliver only rows that fulfil this condition, e.g. country = 'NO' AND amount > 10."
    )
    on_bad_row: Literal["stop", "dead_letter"] = Field(
        default="stop",
        description="A row that the target can never hold stops the sink, or is kept as a dead letter "
        "(firnline dead-letters) while the others go on.",
    )
    start: Literal["now", "beginning"] = Field(
        default="now",
        description="Where the sink begins if it is added to a pipeline with history: with the next epoch, or with the "
        "first one; then every epoch is made again from its input, which must still be readable.",
    )
    copy_from: Name | None = Field(
        default=None,
        description="The Delta table of the pipeline whose rows this sink gets first if it is added to a pipeline with "
        "history. It has the same input and the same `write`.",
    )
    renamed_from: Name | None = Field(
        default=None, description="The sink's former name, under which its target knows it."
    )

    @field_validator("where")
    @classmethod
    def _where_is_a_condition(cls, text: str) -> str:
        if text:
            from firnline.sql.condition import check_condition  # imports a parser

            try:
                check_condition(text)
            except ConfigError as error:
                raise fail(error.message, hint=error.hint) from None
        return text

    @model_validator(mode="after")
    def _columns_fit(self) -> Self:
        if self.columns and self.exclude:
            raise fail("names columns to leave out, and columns already names those to deliver", "exclude")
        lost = [name for name in self.key if name in self.exclude or (self.columns and name not in self.columns)]
        if lost:
            raise fail(f'the key column "{lost[0]}" is not delivered', "key")
        if self.write == "upsert":
            for setting, names in (("exclude", self.exclude), ("mask", self.mask)):
                if needed := next((name for name in (OP, MISSING) if name in names), None):
                    raise fail(f"an upsert needs the column {needed}", setting)
        return self

    @classmethod
    def own_keys(cls) -> list[str]:
        """Return the keys that only such a sink has."""
        return [name for name in DeliveryConfig.model_fields if name not in SinkConfig.model_fields]

    def check_delivered(self, setting: str, names: Iterable[str]) -> None:
        """Refuse a setting that needs a column which is not delivered."""
        for name in names:
            if name in self.exclude or (self.columns and name not in self.columns):
                raise fail(f'the column "{name}" is not delivered', setting)

    def follower_values(self, read_secret: ReadSecret) -> dict[str, Any]:
        """Return the values for an options class; keys without a value are empty text there."""
        values = {key: value for key, value in self.plain(read_secret).items() if key != "type"}
        return values | {key: values[key] or "" for key in ("copy_from", "renamed_from")}


class FollowerConfig(DeliveryConfig, ABC):
    """A sink that is always delivered from the outbox."""

    options_class: ClassVar[type[FollowerOptions]]

    def build(self, input_name: str, read_secret: ReadSecret) -> SinkOptions:
        return self.options_class(**{**self.follower_values(read_secret), "input": input_name})

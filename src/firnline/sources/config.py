"""The keys that every kind of source has in a spec. The model of a kind adds its own."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field, field_validator

from firnline.config.fields import ColumnName, Config, Endpoint, Flag, Ratio, ReadSecret, Seconds, fail
from firnline.options import FieldOptions, SchemaOptions, SourceOptions

OptionsClass: TypeAlias = type[SourceOptions]


class FieldConfig(Config):
    """One declared column."""

    name: ColumnName = Field(description="Name of the column, as in the records.")
    type: str = Field(
        description="string, int32, int64, float32, float64, decimal(p,s), boolean, timestamp, date, binary, json, "
        "list<T>, map<T> or struct<name:T,...>."
    )
    nullable: Flag = Field(default=True, description="Whether the column may be null.")

    @field_validator("type")
    @classmethod
    def _known_type(cls, value: str) -> str:
        if value.count("(") != value.count(")") or value.count("<") != value.count(">"):
            raise fail(f'"{value}" is cut off (inside {{ }} put a type that holds a comma in quotes)')
        from firnline.schema import field_from_spec  # loads Arrow, which a spec without columns does not need

        try:
            field_from_spec({"name": "c", "type": value})
        except ValueError as exc:
            words = str(exc).removeprefix("column 'c': ").removeprefix(f"type {value!r}: ")
            raise fail(words.removesuffix(f" at {value!r}")) from None
        return value


class SchemaConfig(Config):
    """The columns of a source, and how the source treats fields that are no columns yet."""

    fields: tuple[FieldConfig, ...] = Field(
        default=(), description="Declared columns; others are inferred from the records (docs/types.md)."
    )
    evolution: Literal["add", "rescue", "fail"] = Field(
        default="add",
        description="How to treat a field that is no column yet: add makes it a column, rescue keeps it in "
        "_rescued_data, fail stops the epoch.",
    )
    on_widen: Literal["rewrite", "rescue", "fail"] = Field(
        default="rewrite",
        description="How to treat numbers that need a wider type than the table's column has: rewrite gives the column "
        "the wider type and rewrites the table's files in the epoch's commit, rescue keeps the values in "
        "_rescued_data, fail stops the epoch. Declared columns never change (docs/types.md).",
    )

    infer_timestamps: Flag = Field(
        default=True,
        description="Whether a new column of ISO 8601 time stamps (2024-05-01T12:30:00.5+02:00) becomes a timestamp "
        "column; false makes it a string column. Known columns never change (docs/types.md).",
    )

    @field_validator("fields")
    @classmethod
    def _names_differ(cls, fields: tuple[FieldConfig, ...]) -> tuple[FieldConfig, ...]:
        seen: set[str] = set()
        for index, field in enumerate(fields):
            if field.name.lower() in seen:
                raise fail(f'column "{field.name}" is there twice (upper and lower case are the same)', index, "name")
            seen.add(field.name.lower())
        return fields

    def build(self) -> SchemaOptions:
        """Return the options."""
        fields = tuple(FieldOptions(field.name, field.type, field.nullable) for field in self.fields)
        return SchemaOptions(fields, self.evolution, self.on_widen, self.infer_timestamps)


class SourceConfig(Config, ABC):
    """A source. The model of a kind defines `type`, a `Literal` with the name of the kind, and names its options class.

    Every other key of the model is a field of the options class with the same name.
    """

    options_class: ClassVar[OptionsClass]
    batch_defaults: ClassVar[Mapping[str, int]] = {}  # defaults of `batch` that are smaller with this kind
    has_keys: ClassVar[bool] = False  # whether a port of the source says what identifies its rows
    ports: ClassVar[tuple[str, ...] | None] = ()  # beside the main port; None: only the opened source knows them

    type: str = Field(description="Kind of source.")
    poll_interval_secs: Seconds = Field(default=10, description="Seconds between two checks for new input.")
    on_bad_record: Literal["quarantine", "fail"] = Field(
        default="quarantine",
        description="A record that can never be decoded: quarantine stores it apart and continues, fail stops the run.",
    )
    max_bad_ratio: Ratio = Field(
        default=0.5,
        description="Stop when more than this share of an epoch's records (once it has 100) is bad; 1.0 never stops.",
    )
    schema_: SchemaConfig = Field(
        default=SchemaConfig(), alias="schema", description="Columns: inferred by default, or declared."
    )
    lineage: Flag = Field(
        default=False, description="Add the columns _firnline_file, _firnline_record and _firnline_epoch."
    )

    @property
    def endpoint(self) -> Endpoint | None:
        """Where the source reads; no sink of the spec may write there. None: nowhere that a sink could write."""
        return None

    def build(self, name: str, read_secret: ReadSecret) -> SourceOptions:
        """Return the options of the source."""
        fields = {"type", "schema_"}
        values = {key: value for key, value in self.plain(read_secret).items() if key not in fields}
        return self.options_class(name=name, schema=self.schema_.build(), **values)

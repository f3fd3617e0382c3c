"""The keys that every kind of sink has in a spec. The model of a kind adds its own."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from firnline.config.fields import ColumnName, Config, Endpoint, Flag, Name, ReadSecret, differ, fail
from firnline.options import SinkOptions

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
        description="The source or operator to write, or late rows as NAME.late; may be omitted if there is only one "
        "candidate.",
    )
    write: Literal["append", "upsert"] = Field(
        default="append",
        description="append adds rows; upsert keeps one row per key: it applies the changes of an operator, or "
        "the records of a source.",
    )
    key: tuple[ColumnName, ...] = Field(
        default=(),
        description="Upsert: the columns that identify a row; by default those of the operator. A source needs them.",
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

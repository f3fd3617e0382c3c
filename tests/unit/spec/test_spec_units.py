"""Sizes and durations: one way to write them, in every key of a spec and every option of a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from firnline.config.fields import Duration, Millis, Seconds, Size, Window
from firnline.config.units import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    parse_millis,
    parse_seconds,
    parse_size,
    seconds_text,
    size_text,
)
from firnline.spec.models import pipeline_model


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GB", 10**9), ("1GiB", 2**30), ("512MiB", 512 * 2**20), ("1.5 GB", 1_500_000_000), ("1gb", 10**9),
        ("10KB", 10_000), ("10kib", 10_240), ("2TB", 2 * 10**12), ("1048576", 1048576), (" 7 B ", 7), ("0.5KiB", 512),
    ],
)  # fmt: skip
def test_a_size_is_decimal_or_binary_by_its_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "10x", "GB", "-1GB", "1,5GB", "1GBs", "1e9", "1 000", "٣GB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f'must be a size like 1GB, 512MiB or 1048576 (bytes), not "{text}"')
    ):
        parse_size(text)


def test_a_size_that_others_read_differently_is_refused() -> None:
    with pytest.raises(ValueError, match=r'"1g" is ambiguous: write 1GB \(decimal\) or 1GiB \(binary\)'):
        parse_size("1g")
    with pytest.raises(ValueError, match="whole number of bytes"):
        parse_size("1.5B")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10m", 600), ("1h30m", 5400), ("250ms", 0.25), ("90", 90), ("1.5", 1.5), ("1.5h", 5400),
        ("1d2h3m4s5ms", 93784.005),
        ("7d", 604_800), (" 30s ", 30), ("0", 0),
    ],
)  # fmt: skip
def test_a_duration_is_a_sum_of_its_units(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "10x", "m", "30m1h", "1m1m", "-5m", "1h 30m", "1w", "10M", "1e3", "٣m"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be a time like 250ms, 30s, 10m, 1h30m, 7d or 90 \(seconds\), not"):
        parse_seconds(text)
    with pytest.raises(ValueError, match=r"7d or 200 \(milliseconds\), not"):
        parse_millis(text)


def test_a_plain_number_of_milliseconds_is_milliseconds() -> None:
    assert parse_millis("200") == 200
    assert parse_millis("1m") == 60_000
    with pytest.raises(ValueError, match="whole number of milliseconds"):
        parse_millis("0.5ms")


@given(st.integers(min_value=0, max_value=10**15))
def test_sizes_are_read_as_they_are_written(size: int) -> None:
    assert parse_size(size_text(size)) == size
    assert re.fullmatch(SIZE_PATTERN, size_text(size))


@given(st.integers(min_value=0, max_value=10**12))
def test_durations_are_read_as_they_are_written(millis: int) -> None:
    text = seconds_text(millis / 1000)
    assert parse_millis(text) == millis
    assert re.fullmatch(DURATION_PATTERN, text)


# -- in a spec ----------------------------------------------------------------------------------------------


def fields(model: type[BaseModel], seen: set[type[BaseModel]] | None = None) -> Iterator[tuple[type[BaseModel], str]]:
    """All keys of a spec, of every kind of source, sink and operator."""
    seen = set() if seen is None else seen
    if model in seen:
        return
    seen.add(model)
    for name, field in model.model_fields.items():
        yield model, name
        for inner in models_in(field.annotation):
            yield from fields(inner, seen)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


FIELDS = list(fields(pipeline_model()))
UNITS = {"_bytes": ("1MiB", 2**20), "_ms": ("1m30s", 90_000), "_secs": ("1m30s", 90), "_seconds": ("1m30s", 90)}
WITH_UNIT = [(model, name, suffix) for model, name in FIELDS for suffix in UNITS if name.endswith(suffix)]


def test_the_walk_finds_the_keys_with_a_unit() -> None:
    names = {name for _, name, _ in WITH_UNIT}
    assert {"max_bytes", "max_record_bytes", "max_ms", "interval_ms", "poll_interval_secs", "lease_seconds"} <= names


@pytest.mark.parametrize(("model", "name", "suffix"), WITH_UNIT, ids=lambda value: getattr(value, "__name__", value))
def test_every_key_with_a_unit_in_its_name_takes_text(model: type[BaseModel], name: str, suffix: str) -> None:
    info = model.model_fields[name]
    key: TypeAdapter[Any] = TypeAdapter(_annotated(info))
    text, value = UNITS[suffix]
    assert key.validate_python(text) == value
    assert key.validate_python(value) == value
    with pytest.raises(ValidationError, match="like"):
        key.validate_python("10x")


def _annotated(info: Any) -> Any:
    from typing import Annotated

    return Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation


@pytest.mark.parametrize(
    ("kind", "value", "result"),
    [
        (Size, 1_000_000, 1_000_000), (Size, "1000000", 1_000_000), (Millis, "250ms", 250), (Seconds, 1.5, 1.5),
        (Duration, "1h30m", timedelta(minutes=90)), (Duration, 30, timedelta(seconds=30)),
        (Duration, 0.5, timedelta(milliseconds=500)), (Window, 64, 64), (Window, "1d12h", timedelta(hours=36)),
    ],
)  # fmt: skip
def test_a_spec_takes_numbers_and_text(kind: Any, value: Any, result: Any) -> None:
    assert TypeAdapter(kind).validate_python(value) == result


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (Size, True, "must be a number, not true"),
        (Size, 0, "greater than or equal to 1"),
        (Size, "0GB", "greater than or equal to 1"),
        (Millis, "0s", "greater than or equal to 1"),
        (Seconds, "400d", "less than or equal to"),
        (Seconds, "0s", "greater than 0"),
        (Duration, 0, "more than 0 and at most a year"),
        (Duration, "999999999999999999d", "more than 0 and at most a year"),
        (Window, "999999999999999999d", "must be a number of epochs"),
    ],
)
def test_a_spec_refuses_what_is_out_of_range(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(kind).validate_python(value)


def test_the_older_key_of_a_file_size_still_works() -> None:
    from firnline.sinks.delta.config import DeltaSinkConfig

    assert DeltaSinkConfig.model_validate({"table": "t", "file_size_mb": 64}).file_size == 64 * 2**20
    assert DeltaSinkConfig.model_validate({"table": "t", "file_size": "1GB"}).file_size == 10**9
    for wrong in (0, "x", True, 1.5):
        with pytest.raises(ValidationError, match="at least 1; or write file_size"):
            DeltaSinkConfig.model_validate({"table": "t", "file_size_mb": wrong})
    with pytest.raises(ValidationError, match="write only one of them"):
        DeltaSinkConfig.model_validate({"table": "t", "file_size_mb": 64, "file_size": "1GB"})

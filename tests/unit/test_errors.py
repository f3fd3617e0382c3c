"""The error tree: stable codes, exit codes, pickling."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from firnline import errors
from firnline.errors import FirnlineError, MissingExtraError

EXIT_CODES = {1, 2, 3, 4, 5, 6, 7}


def tree(root: type[FirnlineError] = FirnlineError) -> Iterator[type[FirnlineError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


@pytest.mark.parametrize("cls", list(tree()))
def test_an_error_survives_pickling(cls: type[FirnlineError]) -> None:
    error = cls("what happened", hint="do this", epoch=3, file="a.json")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (copy.message, copy.hint, copy.fields) == (error.message, error.hint, error.fields)


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in tree()]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("cls", list(tree()))
def test_every_class_has_an_exit_code_and_a_hint(cls: type[FirnlineError]) -> None:
    assert cls.exit_code in EXIT_CODES
    assert cls("x").hint.strip()
    assert cls.__doc__


@pytest.mark.parametrize("cls", list(tree()))
def test_every_class_is_drawn_in_the_tree(cls: type[FirnlineError]) -> None:
    assert errors.__doc__ is not None
    assert cls.__name__ in errors.__doc__


def test_exit_code_three_means_safe_to_run_again() -> None:
    for cls in tree():
        if cls.exit_code == 3:
            assert cls.retryable, cls


def test_a_missing_extra_says_what_to_type() -> None:
    assert MissingExtraError(extra="kafka").hint == "pip install 'firnline[kafka]'"

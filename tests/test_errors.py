"""The one exception for bad input."""

import pytest

from forebay.errors import MissingExtraError, UserError, did_you_mean, missing_extra, unknown


def test_a_user_error_is_a_value_error_with_exit_code_two():
    assert issubclass(UserError, ValueError)
    assert UserError("x").exit_code == 2


def test_an_unknown_name_lists_all_names_the_closest_first():
    message = str(unknown("tensor", "hiden", ["embed", "hidden", "out"]))
    assert message.startswith("unknown tensor 'hiden': did you mean 'hidden'? There are: hidden, ")
    assert message.count("embed") == message.count("out") == 1


def test_nothing_is_suggested_that_is_not_similar():
    assert did_you_mean("zzz", ["alpha", "beta"]) in ("there are: alpha, beta", "there are: beta, alpha")


def test_case_does_not_matter():
    assert did_you_mean("LLAMA", ["gpt", "llama"]).startswith("did you mean 'llama'?")


def test_names_are_listed_once():
    assert did_you_mean("a", ["a", "a", "b"]).count("b") == 1


def test_nothing_to_choose_from():
    assert did_you_mean("x", []) == "there is none to choose from"


def test_a_missing_package_names_the_extra_that_brings_it():
    error = missing_extra("grain", "train", "reading data")
    assert isinstance(error, MissingExtraError)
    for part in ("reading data", "'grain'", "forebay[train]", "--extra train"):
        assert part in str(error)
    with pytest.raises(ImportError):
        raise error

"""The story in the package's docstring is true."""

from __future__ import annotations

import doctest

from diffserve.runtime import kv


def test_the_worked_example_runs_as_written() -> None:
    (story,) = doctest.DocTestFinder(recurse=False).find(kv, "kv")
    results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(story)
    assert (results.failed, results.attempted) == (0, 23)


def test_the_public_names_are_sorted_and_there() -> None:
    assert kv.__all__ == sorted(kv.__all__)
    assert all(hasattr(kv, name) for name in kv.__all__)

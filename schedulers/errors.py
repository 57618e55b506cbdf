# ruff: noqa: N818 - the tree is named after what happened
"""Errors of the ``schedulers`` package. Every one is a ``ValueError`` that quotes the value and says what would do."""

from __future__ import annotations


class ScheduleError(ValueError):
    """Base of the tree."""


class UnknownSampler(ScheduleError):
    """No sampler of that name; lists the names and the nearest."""


class UnknownSpacing(ScheduleError):
    """No timestep spacing or sigma schedule of that name."""


class BadNumSteps(ScheduleError):
    """``num_steps`` is not a whole number from 1 to the training length."""


class BadStrength(ScheduleError):
    """``strength`` is outside 0..1 or leaves no step to run."""


class BadEta(ScheduleError):
    """``eta`` is negative, not finite, or asks for more fresh noise than a step can hold."""


class BadNoiseSchedule(ScheduleError):
    """The betas or cumulative products given are no noise schedule."""


class UnsupportedOption(ScheduleError):
    """A scheduler configuration asks for something that rows of a table cannot do (clipping, thresholding, ...)."""


class LawBroken(ScheduleError):
    """A table moves an image that is at rest, or loses count of its noise."""

# ruff: noqa: N818 - error names describe the problem and do not end in "Error"
"""Exceptions of the ``schedulers`` package: each is a ``ValueError`` that quotes the value and names valid ones."""

from __future__ import annotations


class ScheduleError(ValueError):
    """Base class of all exceptions of the ``schedulers`` package."""


class UnknownSampler(ScheduleError):
    """The sampler name is unknown; the message lists the known names and the closest one."""


class UnknownSpacing(ScheduleError):
    """The timestep spacing or sigma schedule is unknown."""


class BadNumSteps(ScheduleError):
    """``num_steps`` is not an integer from 1 to the training length."""


class BadStrength(ScheduleError):
    """``strength`` is outside 0..1 or leaves no step to run."""


class BadSigmaRange(ScheduleError):
    """``sigma_min`` is not above 0, or not below ``sigma_max``."""


class BadEta(ScheduleError):
    """``eta`` is negative, not finite, or asks for more fresh noise than a step can hold."""


class BadNoiseSchedule(ScheduleError):
    """The betas or their cumulative products do not form a valid noise schedule."""


class UnsupportedOption(ScheduleError):
    """A scheduler configuration needs a feature that a step table cannot express (clipping, thresholding, ...)."""


class InvalidTable(ScheduleError):
    """A step table is inconsistent: it changes a noise-free image, or its noise levels do not match its rows."""

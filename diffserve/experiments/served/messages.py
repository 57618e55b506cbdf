"""Messages between a server and the process of an experiment, sent as frames of msgpack."""

from __future__ import annotations

import msgspec

from diffserve.api.types import GenerationRequest, ImageResult, ModelInfo, ModelProfile
from diffserve.experiments.plan import SweepPlan
from diffserve.experiments.summary import CellSummary
from diffserve.experiments.verdicts import Comparison


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message to the process: run ``plan`` and store it in ``folder``.

    Attributes:
        plan: The plan.
        folder: Folder of the records and the report.
        info: The model that generates the images.
        profile: Its profile, from which the process reads the autoencoder if it needs one.
        is_deterministic: Whether an image's bytes are independent of the rest of the batch.
        max_in_flight: Images that may be requested at once.
    """

    plan: SweepPlan
    folder: str
    info: ModelInfo
    profile: ModelProfile
    is_deterministic: bool
    max_in_flight: int


class Painted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The image of a request."""

    result: ImageResult


class NotPainted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The error of a request."""

    request_id: str
    code: str
    message: str
    param: str | None = None


class Paint(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request for an image."""

    request: GenerationRequest


class Advanced(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Progress: UNet rows done and to do in this run, and the number of images on disk."""

    phase: str
    rows_done: int
    num_rows: int
    num_images: int


class CellDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A cell has all images of its look, with its comparisons with finished cells."""

    cell: CellSummary
    comparisons: tuple[Comparison, ...]


class Over(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last message of the process: the report is written, or the error with a trace for the log."""

    code: str = ""
    message: str = ""
    trace: str = ""


ToProcess = Begin | Painted | NotPainted
FromProcess = Paint | Advanced | CellDone | Over

"""From a picture to the control map that a ControlNet was trained on: edges, and what a library adds."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from PIL import Image

from diffserve.api.errors import InvalidRequest
from diffserve.media.canny import Pixels, edge_map
from diffserve.models.controlnets import CANNY, PARAM, PASSED_THROUGH, Control
from diffserve.runtime.loading.library_imports import import_quietly

LIBRARY: Final = "controlnet_aux"
RANDOM: Final = "shuffle"

logger = logging.getLogger(__name__)


def check_preprocessor(name: str) -> None:
    """InvalidRequest for one that is not here."""
    if name in (PASSED_THROUGH, CANNY):
        return
    names, trouble = _library()
    if name in names:
        return
    known = ", ".join((PASSED_THROUGH, CANNY, *names))
    more = f"; others come with the package {LIBRARY}, which {trouble}" if trouble else ""
    raise InvalidRequest(f"the preprocessor is {name!r}; there are {known}{more}.", param=PARAM)


def preprocess(control: Control, picture: Pixels) -> Pixels:
    """Return the control map (height, width, 3) of ``picture`` (height, width, 3). Raises InvalidRequest."""
    name = control.preprocessor
    if name == PASSED_THROUGH:
        return picture
    if name == CANNY:
        return edge_map(picture, *control.thresholds, control.resolution)
    check_preprocessor(name)
    height, width = picture.shape[:2]
    try:
        found = import_quietly(f"{LIBRARY}.processor", "Processor")(name)(Image.fromarray(picture), to_pil=True)
    except Exception as error:  # its own weights are looked for on the network, which is not asked here
        said = f"the preprocessor {name!r} of {LIBRARY} cannot be used ({type(error).__name__}); give a control map."
        raise InvalidRequest(said, param=PARAM) from error
    return np.asarray(found.convert("RGB").resize((width, height), Image.Resampling.LANCZOS), dtype=np.uint8)


def _library() -> tuple[tuple[str, ...], str]:
    """The names of the library, less what gives another map each time; and why there are none."""
    if find_spec(LIBRARY) is None:
        return (), "is not installed here"
    try:
        known: dict[str, Any] = import_quietly(f"{LIBRARY}.processor", "MODELS")
    except Exception as error:  # whatever one of the many libraries that it wants says
        logger.warning("%s cannot be imported: %s", LIBRARY, error)
        return (), f"cannot be imported here ({error})"
    return tuple(sorted({*known} - {CANNY, PASSED_THROUGH, RANDOM})), ""

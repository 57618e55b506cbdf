"""Measures by networks whose weights the user names: CLIPScore, preference models and an LPIPS-like distance.

Weights come from folders on disk in the layout of their publishers, in safetensors; nothing is downloaded. Networks run
in float32 on the engine's device, so values agree with the publishers' code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.experiments.axes import quote
from diffserve.experiments.estimates import MODEL_MEASURES, Measure
from diffserve.experiments.measure import ModelMeasures
from diffserve.models.model_files import model_path

if TYPE_CHECKING:
    from diffserve.runtime.precision import DeviceChoice

Pixels = NDArray[np.uint8]
Folders = Mapping[Measure, Path]
Loader = Callable[[Path, "DeviceChoice"], Callable[[str, Pixels], float]]

CLIP_SCALE: Final = 100.0
"""CLIPScore as torchmetrics scales it: 100 max(cosine, 0) (Hessel et al. 2021, arXiv 2104.08718, has 2.5)."""

CONTENTS: Final = {
    Measure.CLIP_SCORE: "a CLIP model in transformers' format",
    Measure.PICK_SCORE: "PickScore, a CLIP model in transformers' format",
    Measure.HPS_V2: "HPSv2: its safetensors file, or a CLIP model in transformers' format",
    Measure.IMAGE_REWARD: "ImageReward.safetensors, med_config.json and the tokenizer's files of bert-base-uncased",
    Measure.LPIPS: "a backbone in transformers' format, such as a ResNet",
}
HASHED_SUFFIXES: Final = (".safetensors", ".json", ".txt")


def read_measures(texts: Iterable[str]) -> dict[Measure, Path]:
    """Parse texts such as "clip_score=FOLDER,lpips=FOLDER" and check that the folders exist.

    Raises:
        InvalidRequest: A measure is unknown or given twice, or its folder is missing.
    """
    folders: dict[Measure, Path] = {}
    for part in (part for text in texts for part in re.split(r",\s*(?=\w+\s*=)", text)):
        name, _, folder = (field.strip() for field in part.partition("="))
        measure = next((measure for measure in MODEL_MEASURES if measure.value == name), None)
        if measure is None:
            names = ", ".join(measure.value for measure in MODEL_MEASURES)
            raise InvalidRequest(f"--measures has {quote(name)}; the measures are {names}.", param="measures")
        if measure in folders:
            raise InvalidRequest(f"--measures has {name} twice; give it one folder.", param="measures")
        folders[measure] = Path(folder)
        check_folder(measure, folder)
    return folders


def check_folder(measure: Measure, folder: str | Path) -> None:
    """Check that the folder of a measure's weights exists.

    Raises:
        InvalidRequest: There is no folder; the message says what it must contain.
    """
    form = f"pass --measures {measure.value}=FOLDER with {CONTENTS[measure]}."
    if not str(folder):
        raise InvalidRequest(f"{measure.value} needs weights: {form}", param="measures")
    if not model_path(folder).is_dir():
        message = f"{measure.value} needs weights, and there is no folder {str(folder)!r}: {form}"
        raise InvalidRequest(message, param="measures")


def check_detected(differences: Iterable[str], folders: Folders) -> None:
    """Check that each measure whose differences matter can be computed.

    Raises:
        InvalidRequest: A measure needs weights.
    """
    for name in differences:
        if name in (measure.value for measure in MODEL_MEASURES) and Measure(name) not in folders:
            check_folder(Measure(name), "")


def digest_measures(folders: Folders) -> dict[str, str]:
    """Return a digest of the weights and configurations of each measure, by its name."""
    from diffserve.disk_cache import AUTO, DiskCache
    from diffserve.runtime.loading.checkpoint import digest_files

    cache = DiskCache.at(AUTO)
    return {
        measure.value: digest_files(
            [file for file in model_path(folder).iterdir() if file.suffix in HASHED_SUFFIXES], cache
        )
        for measure, folder in folders.items()
    }


def load_measures(folders: Folders, device: str) -> ModelMeasures:
    """Load the networks of measures.

    Args:
        folders: Folder of the weights of each measure.
        device: Device of the networks.

    Raises:
        InvalidRequest: The folder of a measure is missing or holds other files.
    """
    if not folders:
        return ModelMeasures()
    from diffserve.runtime.feature_distance import FeatureDistance
    from diffserve.runtime.precision import choose_device

    choice = choose_device(device, "float32")
    scores, lpips = {}, None
    for measure, folder in folders.items():
        check_folder(measure, folder)
        try:
            if measure is Measure.LPIPS:
                lpips = FeatureDistance.load(folder, choice).distance
            else:
                scores[measure.value] = LOADERS[measure](folder, choice)
        except DiffserveError as error:
            message = f"{measure.value} cannot use {str(folder)!r}; it needs {CONTENTS[measure]}: {error.message}"
            raise InvalidRequest(message, param="measures") from None
    return ModelMeasures(scores, lpips)


def _load_clip_score(folder: Path, choice: DeviceChoice) -> Callable[[str, Pixels], float]:
    from diffserve.runtime.clip_scorer import ClipScorer

    scorer = ClipScorer.load(folder, choice)
    return lambda prompt, pixels: CLIP_SCALE * max(0.0, scorer.score(prompt, pixels))


def _load_pick_score(folder: Path, choice: DeviceChoice) -> Callable[[str, Pixels], float]:
    """Load PickScore (Kirstain et al. 2023, arXiv 2305.01569): the logit of a CLIP model."""
    from diffserve.runtime.clip_scorer import ClipScorer

    scorer = ClipScorer.load(folder, choice)
    scale = scorer.logit_scale
    return lambda prompt, pixels: scale * scorer.score(prompt, pixels)


def _load_hps(folder: Path, choice: DeviceChoice) -> Callable[[str, Pixels], float]:
    """Load HPSv2: the cosine of a CLIP model, whose images are padded to squares instead of cropped."""
    from diffserve.runtime.open_clip_scorer import letterbox, load_hps

    scorer = load_hps(folder, choice)
    return lambda prompt, pixels: scorer.score(prompt, letterbox(pixels, scorer.side_px))


def _load_image_reward(folder: Path, choice: DeviceChoice) -> Callable[[str, Pixels], float]:
    from diffserve.runtime.image_reward import ImageRewardScorer

    return ImageRewardScorer.load(folder, choice).score


LOADERS: Final[Mapping[Measure, Loader]] = {
    Measure.CLIP_SCORE: _load_clip_score,
    Measure.PICK_SCORE: _load_pick_score,
    Measure.HPS_V2: _load_hps,
    Measure.IMAGE_REWARD: _load_image_reward,
}

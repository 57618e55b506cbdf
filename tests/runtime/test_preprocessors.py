"""Canny's edges, by what they must be: where the picture changes most, thin, and joined."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from diffserve.api.errors import InvalidRequest
from diffserve.media.canny import SIGMA, canny, edge_map
from diffserve.models.controlnets import CANNY, PASSED_THROUGH, Control
from diffserve.runtime.controlnet_store import preprocess


def drawn(levels: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.repeat(levels.round().astype(np.uint8)[..., None], 3, axis=2)


def disk(side: int, radius: float, light: float) -> NDArray[np.uint8]:
    across, along = np.mgrid[:side, :side] - (side - 1) / 2
    return drawn(light * (np.hypot(across, along) < radius))


def test_the_edge_of_a_disk_is_its_circle_a_pixel_or_two_wide() -> None:
    edges = canny(disk(160, 50.0, 200.0)) > 0
    distances = np.hypot(*(np.argwhere(edges) - 79.5).T)
    assert np.abs(distances - 50.0).max() < 1.5
    angles = np.degrees(np.arctan2(*(np.argwhere(edges) - 79.5).T)) % 360 // 3  # a pixel is 1.1 degrees
    assert len(np.unique(angles)) == 120, "the circle has gaps"
    assert edges.sum() < 1.3 * 2 * np.pi * 50


@pytest.mark.parametrize("axis", [0, 1])
def test_a_step_is_one_line_a_ramp_is_none_and_a_border_is_none(axis: int) -> None:
    step = drawn(np.where(np.arange(40) < 17, 20.0, 220.0)[:, None].repeat(30, 1))
    ramp = drawn(np.linspace(0.0, 255.0, 40)[:, None].repeat(30, 1))
    edges = canny(step if axis == 0 else step.transpose(1, 0, 2))
    edges = edges if axis == 0 else edges.T
    assert np.flatnonzero(edges.any(axis=1)).tolist() in ([16], [17])
    assert edges.any(axis=0).all()
    assert not canny(ramp).any()


def test_what_is_weak_counts_where_it_leads_to_what_is_strong() -> None:
    """A fading line is detected down to the lower threshold; a weak line alone is not detected."""
    contrast = 255.0 * np.linspace(1.0, 0.0, 200)[None].repeat(40, 0)
    line = drawn(np.where(np.arange(40)[:, None] < 20, 0.0, contrast))
    gradient = 4.0 * contrast[0] * np.exp(-0.5 * (0.5 / SIGMA) ** 2) / (SIGMA * np.sqrt(2 * np.pi)) * 2.0
    reach = np.flatnonzero((canny(line) > 0).any(axis=0)).max()
    assert abs(gradient[reach] - 100.0) < 15.0
    weak = line[:, np.searchsorted(-gradient, -190.0) + 5 :]
    assert not canny(weak).any()
    assert canny(weak, weak=50.0, strong=100.0).any()


def test_a_map_is_passed_through_and_an_unknown_preprocessor_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if the library's dependency torchvision is missing, which has no CPU build on PyPI."""
    picture = disk(64, 20.0, 200.0)
    assert preprocess(Control("edges", preprocessor=PASSED_THROUGH), picture) is picture
    assert np.array_equal(preprocess(Control("edges", preprocessor=CANNY), picture)[..., 2], canny(picture))
    for trouble in ("is not installed", "cannot be imported here (No module named 'torchvision_for_cpus'"):
        message = f"'hed'; use one of none, canny; others need the package controlnet_aux, which {trouble}"
        with pytest.raises(InvalidRequest, match=re.escape(message)):
            preprocess(Control("edges", preprocessor="hed"), picture)
        library = tmp_path / "controlnet_aux"
        library.mkdir(exist_ok=True)
        (library / "__init__.py").touch()
        (library / "processor.py").write_text("import torchvision_for_cpus\n")
        monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("controlnet_aux", None)


def test_edges_follow_the_thresholds_and_the_resolution() -> None:
    picture = disk(96, 30.0, 40.0)
    assert not preprocess(Control("edges", preprocessor=CANNY), picture).any(), "a weak contrast"
    edges = preprocess(Control("edges", preprocessor=CANNY, thresholds=(20.0, 60.0)), picture)
    assert np.array_equal(edges[..., 0], canny(picture, 20.0, 60.0))
    assert edges.any()
    picture = disk(96, 30.0, 200.0)
    for resolution in (48, 192):
        edges = edge_map(picture, resolution=resolution)
        assert edges.shape == picture.shape
        distances = np.hypot(*(np.argwhere(edges[..., 0] > 0) - 47.5).T)
        assert np.abs(distances - 30.0).max() < 3.0, "the circle is where it was"
        assert not np.array_equal(edges, edge_map(picture))
    with pytest.raises(InvalidRequest, match="edges are detected in at most 8388608 pixels, the image has 20480x2048"):
        edge_map(np.zeros((10, 100, 3), np.uint8), resolution=2048)

"""Measures of a sweep and estimates with confidence intervals, without torch or an engine."""

from __future__ import annotations

from enum import Enum

import msgspec


class Measure(Enum):
    """A measure of a cell; the value is its name in files.

    ``SET_MEASURES`` are distances between sets of images, all others are means over images. ``MODEL_MEASURES`` need
    networks whose weights the user names; a new one is a member here and a loader in ``model_measures``.
    """

    EXACT = "exact"
    CLIP_SCORE = "clip_score"
    PICK_SCORE = "pick_score"
    HPS_V2 = "hps_v2"
    IMAGE_REWARD = "image_reward"
    LPIPS = "lpips"
    LATENT_RMSE = "latent_rmse"
    PSNR_DB = "psnr_db"
    SSIM = "ssim"
    FRECHET = "frechet"
    KID = "kid"
    FRECHET_CONVERGED = "frechet_converged"
    KID_CONVERGED = "kid_converged"

    @property
    def more_is_better(self) -> bool:
        """Whether a larger value is better."""
        return self in (Measure.EXACT, Measure.PSNR_DB, Measure.SSIM, *PROMPT_MEASURES)

    @property
    def direction(self) -> str:
        """The direction of better values, for titles."""
        return "higher is better" if self.more_is_better else "lower is better"

    @property
    def title(self) -> str:
        """Display name for axes and headings."""
        return TITLES[self]

    @property
    def short_title(self) -> str:
        """Short display name for table columns."""
        return TITLES[self].replace(" to the converged image", "").replace("distance to ", "to ")

    def write(self, value: float) -> str:
        """Format ``value`` with its unit."""
        if self is Measure.EXACT:
            return f"{100 * value:.1f} %"
        if self is Measure.PSNR_DB:
            return f"{value:.1g} dB" if 0 < abs(value) < 0.05 else f"{value:.1f} dB"
        return f"{value:.4g}" if self in PROMPT_MEASURES else f"{value:.3g}"

    def write_range(self, low: float, high: float) -> str:
        """Format two values with a single unit: "81.2 to 93.8 %"."""
        unit = {Measure.EXACT: " %", Measure.PSNR_DB: " dB"}.get(self, "")
        return f"{self.write(low).removesuffix(unit)} to {self.write(high)}"

    def write_difference(self, value: float) -> str:
        """Format a difference without its sign: "12.5 points"."""
        return f"{100 * abs(value):.1f} points" if self is Measure.EXACT else self.write(abs(value))


PROMPT_MEASURES = (Measure.CLIP_SCORE, Measure.PICK_SCORE, Measure.HPS_V2, Measure.IMAGE_REWARD)
"""Scores of an image and its prompt by a network."""

MODEL_MEASURES = (*PROMPT_MEASURES, Measure.LPIPS)
"""Measures by networks whose weights the user names."""

SET_MEASURES = (Measure.FRECHET, Measure.KID, Measure.FRECHET_CONVERGED, Measure.KID_CONVERGED)

TITLES = {
    Measure.EXACT: "exact prompt match",
    Measure.CLIP_SCORE: "CLIPScore",
    Measure.PICK_SCORE: "PickScore",
    Measure.HPS_V2: "HPSv2",
    Measure.IMAGE_REWARD: "ImageReward",
    Measure.LPIPS: "LPIPS-like distance to the converged image",
    Measure.LATENT_RMSE: "latent RMSE to the converged image",
    Measure.PSNR_DB: "PSNR to the converged image",
    Measure.SSIM: "SSIM to the converged image",
    Measure.FRECHET: "Frechet distance to rendered scenes",
    Measure.KID: "KID to rendered scenes",
    Measure.FRECHET_CONVERGED: "Frechet distance to converged images",
    Measure.KID_CONVERGED: "KID to converged images",
}


class Estimate(msgspec.Struct, frozen=True):
    """A measured value and its 95 % interval; ``low`` and ``high`` are ``None`` with too few prompts."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def sign(self) -> int:
        """1 or -1 if the interval is on one side of zero, otherwise 0 (not distinguishable from zero)."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 0) - int(self.high < 0)


class CheckerError(msgspec.Struct, frozen=True):
    """Error of the prompt checker on images of known content; see ``PromptCheck.error``.

    Attributes:
        count: Number of images that show exactly what their prompt says.
        missed: Share of them that the checker does not accept, in 0..1.
        wrong: Share of images of other prompts' scenes that it accepts, in 0..1; ``None`` if all prompts name the same
            objects.
    """

    count: int
    missed: float
    wrong: float | None = None

    def __str__(self) -> str:
        """Describe the error for headings and sentences."""
        accepts = "" if self.wrong is None else f", accepts {100 * self.wrong:.1f} % of wrong ones"
        return f"checker misses {100 * self.missed:.1f} % of right images{accepts}"

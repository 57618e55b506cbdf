"""Theme of the page: gray, one accent color and system fonts, in light and dark. See also ``page.css``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import gradio as gr

STYLE: Final = Path(__file__).with_name("page.css")
NAMES: Final = ("page", "memory", "keys", "drop", "palette", "mark", "lost")
SCRIPTS: Final = tuple(Path(__file__).with_name(f"{name}.js") for name in NAMES)
"""Scripts in the order in which they run."""
FONTS: Final = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
MONO: Final = ("ui-monospace", "SFMono-Regular", "Consolas", "monospace")


def theme() -> gr.themes.Base:
    """Return the theme; it downloads no fonts."""
    return gr.themes.Base(
        primary_hue="teal", secondary_hue="teal", neutral_hue="zinc", radius_size="lg", font=FONTS, font_mono=MONO
    ).set(
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        block_title_text_color="*neutral_600",
        block_title_text_color_dark="*neutral_300",
        block_label_text_color="*neutral_600",
        block_label_text_color_dark="*neutral_300",
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_border_width_dark="0px",
        block_shadow="none",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        block_title_text_weight="500",
        block_padding="0px",
        input_background_fill="white",
        input_background_fill_dark="*neutral_900",
        input_border_width="1px",
        input_border_color="*neutral_300",
        input_border_color_dark="*neutral_700",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_800",
        button_primary_text_color="white",
        button_secondary_background_fill="white",
        button_secondary_background_fill_dark="*neutral_800",
        button_secondary_background_fill_hover="*neutral_100",
        button_secondary_background_fill_hover_dark="*neutral_700",
        button_secondary_border_color="*neutral_300",
        button_secondary_border_color_dark="*neutral_600",
        button_border_width="1px",
        color_accent="*primary_700",
        color_accent_soft="*primary_50",
        color_accent_soft_dark="*primary_900",
        layout_gap="16px",
    )

"""The looks of the tab's own parts: CSS of their own components, in the page's colours, light and dark."""

from __future__ import annotations

from typing import Final

from diffserve.experiments.svg import STYLE

SAID: Final = """
p { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.note { margin-top: 4px; font-size: var(--text-sm); color: var(--body-text-color-subdued); }
.error p:not(.note) { color: var(--error-text-color); }
.bar { height: 3px; margin: 0 0 8px; border-radius: 2px; overflow: hidden; background: var(--border-color-primary); }
.bar i { display: block; height: 100%; background: var(--color-accent); transition: width 0.25s linear; }
"""

GRID: Final = """
.exp-scroll { --side: clamp(52px, 14vw, 116px); overflow-x: auto; width: 0; min-width: 100%; }
table { border-collapse: separate; border-spacing: 6px; margin: 0 -6px; }
table, th, td { border: 0; }
caption { text-align: left; font-size: var(--text-sm); color: var(--body-text-color-subdued); padding: 0 6px 4px; }
th { font-weight: 500; font-size: var(--text-sm); color: var(--body-text-color-subdued); white-space: nowrap; }
thead th { text-align: center; padding-bottom: 2px; }
thead th.corner { text-align: right; }
th small { display: block; font-weight: 400; font-size: var(--text-xs); }
tbody th { position: sticky; left: 0; z-index: 1; text-align: right; padding-right: 6px;
  background: var(--body-background-fill); white-space: normal; max-width: 6em; }
@media (max-width: 600px) { table { border-spacing: 4px; } th { font-size: var(--text-xs); } }
td { width: var(--side); min-width: var(--side); vertical-align: top; text-align: center; padding: 0; }
td.trouble { vertical-align: middle; font-size: var(--text-xs); color: var(--body-text-color-subdued); }
td img, td .blank { display: block; width: var(--side); max-width: none; aspect-ratio: 1; margin: 0;
  object-fit: contain; border-radius: 6px;
  background: color-mix(in srgb, var(--border-color-primary) 40%, transparent); }
td img.preview { opacity: 0.75; }
td a { display: block; border-radius: 6px; }
td a:focus-visible { outline: 2px solid var(--color-accent); outline-offset: 2px; }
td small { font-size: var(--text-xs); color: var(--body-text-color-subdued); line-height: 1.3; display: block; }
.bar { height: 3px; margin: 3px 0 0; border-radius: 2px; overflow: hidden; background: var(--border-color-primary); }
.bar i { display: block; height: 100%; background: var(--color-accent); }
"""

CURVES: Final = f"""{STYLE}
.note {{ font-size: var(--text-sm); color: var(--body-text-color-subdued); margin: 4px 0; max-width: 70ch; }}
"""

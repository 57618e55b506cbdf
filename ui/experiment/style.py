"""The looks of the tab's own parts: CSS of their own components, in the page's colours, light and dark."""

from __future__ import annotations

from typing import Final

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

CURVES: Final = """
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 4px; padding: 0; list-style: none;
  font-size: var(--text-sm); }
.legend li { display: flex; align-items: center; gap: 6px; margin: 0; }
.legend svg { width: 12px; height: 12px; }
.charts { display: flex; flex-wrap: wrap; gap: 12px 24px; }
figure { flex: 1 1 300px; max-width: 460px; min-width: 0; margin: 0; }
figcaption { font-size: var(--text-sm); font-weight: 500; margin-bottom: 2px; }
figcaption small { font-weight: 400; color: var(--body-text-color-subdued); }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
.grid { stroke: var(--border-color-primary); stroke-width: 1; opacity: 0.6; }
.tick, .axis { fill: var(--body-text-color-subdued); font-size: 12px; }
@media (max-width: 600px) { .tick, .axis { font-size: 15px; } }
.level { stroke: var(--body-text-color-subdued); stroke-width: 1.2; stroke-dasharray: 2 4; }
.front { fill: none; stroke: var(--body-text-color-subdued); stroke-width: 1.2; stroke-dasharray: 6 4; }
.knee { fill: none; stroke: var(--body-text-color); stroke-width: 1.4; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.reach { fill: none; stroke-width: 2; opacity: 0.45; }
.dot { stroke: var(--body-background-fill); stroke-width: 1; }
.note { font-size: var(--text-sm); color: var(--body-text-color-subdued); margin: 4px 0; max-width: 70ch; }
"""

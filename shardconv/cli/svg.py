"""A drawing of sets: one bar a rank, coloured by style, and the largest tensors by name. Pure; gives SVG text."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..format.summary import human

WIDTH = 960  # pixels, as are all lengths below
_LEFT, _RIGHT = 120, 850  # where bars begin, and where the longest one ends
_BAR, _GAP, _LINE = 22, 6, 20  # height of a bar, space between bars, height of a line of text
_GLYPH = 6.7  # a generous width of one character of 12 px text
_NAME_LIMIT = 78  # characters of a tensor's name that have room
_PALETTE: Mapping[str, str] = {
    "colwise": "#3b6fb6", "packed_colwise": "#7fb2e5", "rowwise": "#2e8b72", "packed_rowwise": "#86c9a4",
    "rowwise_split_input": "#9a6fb0", "replicated": "#e3a13c", "sharded": "#3b6fb6",
}  # fmt: skip
_OTHER, _DARK, _DIM = "#8a94a0", "#1f2933", "#5f6b7a"
_FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
_END = 'text-anchor="end"'
_NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Row:
    """One of the largest tensors."""

    name: str
    style: str
    what: str  # dtype and shape
    nbytes: int  # of one rank


@dataclass(frozen=True, slots=True)
class Chart:
    """One set, or one file."""

    title: str
    subtitle: str
    bars: Sequence[str]  # what each bar is; all are alike
    styles: Mapping[str, int]  # style -> bytes of one bar, in drawing order; the replicated one last
    largest: Sequence[Row]


def draw(charts: Sequence[Chart]) -> str:
    """An SVG document of `charts`, one under the other."""
    parts: list[str] = []
    y = 0.0
    for chart in charts:
        drawn, height = _chart(chart)
        parts.append(f'<g transform="translate(0 {y:g})">\n' + "\n".join(drawn) + "\n</g>")
        y += height
    title = _text(", ".join(chart.title for chart in charts))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y:g}" viewBox="0 0 {WIDTH} {y:g}" '
        f'role="img" font-family="{_FONT}" font-size="12" fill="{_DARK}">\n'
        f"<title>{title}</title>\n"
        '<defs><pattern id="replicated" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{_PALETTE["replicated"]}"/>'
        '<rect width="1.5" height="6" fill="#ffffff" fill-opacity="0.55"/></pattern></defs>\n'
        f'<rect width="{WIDTH}" height="{y:g}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _chart(chart: Chart) -> tuple[list[str], float]:
    """Its elements, and its height."""
    parts = [
        _label(24, 34, chart.title, 'font-size="17" font-weight="600"'),
        _label(24, 54, _shorten(chart.subtitle, 135), f'fill="{_DIM}"'),
    ]
    y = 70.0
    legend, y = _legend(chart, y)
    bars, y = _bars(chart, y + 8)
    rows, y = _rows(chart, y + 14)
    return parts + legend + bars + rows, y + 16


def _legend(chart: Chart, y: float) -> tuple[list[str], float]:
    """A swatch and a sum for each style, in as many lines as it takes."""
    parts = []
    x = 24.0
    for style, nbytes in chart.styles.items():
        label = f"{style} {human(nbytes)}"
        width = 18 + len(label) * _GLYPH + 22
        if x + width > WIDTH - 24 and x > 24:
            x, y = 24.0, y + _LINE
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="12" height="12" rx="2" fill="{_fill(style)}"/>')
        parts.append(_label(x + 18, y + 10.5, label))
        x += width
    return parts, y + _LINE


def _bars(chart: Chart, y: float) -> tuple[list[str], float]:
    """The bars, each with its sum, under the mark of the replicated share."""
    total = sum(chart.styles.values())
    scale = (_RIGHT - _LEFT) / max(total, 1)
    whole = chart.styles.get("replicated", 0)
    parts = []
    bottom = y + _LINE + len(chart.bars) * (_BAR + _GAP)
    if whole and len(chart.styles) > 1:
        start = _RIGHT - whole * scale
        share = f"every rank holds the same {human(whole)} whole: {whole / total:.0%} of a rank"
        parts.append(_label(_RIGHT, y + 8, share, _END))
        parts.append(
            f'<path d="M{start:.1f} {bottom - 2:.1f} V{y + 14:.1f} H{_RIGHT} V{bottom - 2:.1f}" fill="none" '
            'stroke="#9a6a1a" stroke-dasharray="3 3"/>'
        )
    y += _LINE
    for label in chart.bars:
        parts.append(_label(_LEFT - 10, y + 15, _shorten(label, 15), _END))
        parts += _bar(chart, y, scale)
        parts.append(_label(_RIGHT + 10, y + 15, human(total)))
        y += _BAR + _GAP
    return parts, y


def _bar(chart: Chart, y: float, scale: float) -> list[str]:
    parts = []
    x = float(_LEFT)
    for style, nbytes in chart.styles.items():
        width = nbytes * scale
        about = _text(f"{style}: {human(nbytes)}")
        parts.append(
            f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{_BAR}" fill="{_fill(style)}" stroke="#ffffff">'
            f"<title>{about}</title></rect>"
        )
        if style != "replicated" and width > len(human(nbytes)) * _GLYPH + 12:
            ink = f'text-anchor="middle" fill="{_ink(style)}"'
            parts.append(_label(x + width / 2, y + 15, human(nbytes), ink))
        x += width
    return parts


def _rows(chart: Chart, y: float) -> tuple[list[str], float]:
    """The largest tensors, each with what it takes of a rank as a small bar."""
    if not chart.largest:
        return [], y
    parts = [_label(24, y + 10, "Largest tensors in one bar", 'font-weight="600"')]
    y += _LINE + 2
    most = max(chart.largest[0].nbytes, 1)
    for row in chart.largest:
        width = max(1.0, 90 * row.nbytes / most)
        parts += [
            f'<rect x="24" y="{y:g}" width="{width:.1f}" height="12" fill="{_fill(row.style)}"/>',
            _label(200, y + 10.5, human(row.nbytes), _END),
            _label(216, y + 10.5, _shorten(row.name, _NAME_LIMIT), full=row.name),
            _label(WIDTH - 24, y + 10.5, _shorten(row.what, 26), f'{_END} fill="{_DIM}"'),
        ]
        y += _LINE
    return parts, y


def _label(x: float, y: float, text: str, attributes: str = "", full: str = "") -> str:
    """Text with its base line at `y`; `full` shows when somebody points at it."""
    title = f"<title>{_text(full)}</title>" if full else ""
    return f'<text x="{x:.1f}" y="{y:g}" {attributes}>{title}{_text(text)}</text>'


def _fill(style: str) -> str:
    return "url(#replicated)" if style == "replicated" else _PALETTE.get(style, _OTHER)


def _ink(style: str) -> str:
    """Readable on the style's colour."""
    return _DARK if style in ("packed_colwise", "packed_rowwise") else "#ffffff"


def _shorten(text: str, limit: int) -> str:
    """The middle left out; both ends of a tensor's name say something."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2 - 1]}\u2026{text[-(limit - limit // 2) :]}"


def _text(text: str) -> str:
    """Fit for XML, whatever a header called its tensors."""
    return html.escape(_NOT_XML.sub("\ufffd", text))

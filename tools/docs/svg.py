"""A drawing as the text of an SVG file, without fonts, scripts or other files, for light and dark screens."""

from collections.abc import Sequence
from html import escape

STYLE = """
svg { --ink: #1b1b1b; --faint: #8a8a8a; --paper: #ffffff; --box: #eef3f8; --held: #9cc4e4; --host: #f3d9a4;
      --line: #0072b2; --second: #d55e00; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e8e8e8; --faint: #8d939b; --paper: #16181c; --box: #262d36; --held: #2f6690; --host: #7a5c1e;
        --line: #56b4e9; --second: #e69f00; }
}
text { font: 13px sans-serif; fill: var(--ink); }
.small { font-size: 11px; } .bold { font-weight: bold; }
.ink { stroke: var(--ink); fill: none; } .grid { stroke: var(--faint); fill: none; stroke-width: 0.4; }
.line { stroke: var(--line); fill: none; }
.second { stroke: var(--second); fill: none; stroke-dasharray: 5 3; }
"""


class Drawing:
    """Collects shapes; coordinates are pixels from the upper left corner."""

    def __init__(self, width: float, height: float, title: str):
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def add(self, shape: str) -> None:
        self.parts.append(shape)

    def text(self, x: float, y: float, text: str, classes: str = "", anchor: str = "middle") -> None:
        style = f' class="{classes}"' if classes else ""
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>')

    def box(self, x: float, y: float, w: float, h: float, line: str) -> None:
        """Draw a rectangle around a line of text."""
        edge = 'fill="var(--box)" stroke="var(--faint)" stroke-width="0.8"'
        self.add(f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="4" {edge}/>')
        self.text(x + w / 2, y + h / 2 + 4.5, line)

    def path(self, points: Sequence[tuple[float, float]], classes: str) -> None:
        d = "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.add(f'<path d="{d}" class="{classes}"/>')

    def curve(self, points: Sequence[tuple[float, float]]) -> None:
        """Draw an arrow through the points that leaves and enters each of them vertically."""
        d = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
        for (x0, y0), (x1, y1) in zip(points, points[1:]):
            middle = (y0 + y1) / 2
            d += f" C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}"
        self.add(f'<path d="{d}" class="ink" marker-end="url(#head)"/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {self.height:.0f}" '
            f'width="{self.width:.0f}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="var(--ink)"/></marker></defs>\n'
            '<rect width="100%" height="100%" fill="var(--paper)"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"

"""A legend below a picture: the names of classes next to their colours."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from sdrseg.colours import Colour

SMALLEST = 11  # font size in pixels


def with_legend(picture: Image.Image, classes: Sequence[tuple[str, Colour]]) -> Image.Image:
    """The picture with a legend below it, in as many rows as the names need. Long names are shortened."""
    if not classes:
        return picture
    size = max(SMALLEST, picture.width // 60)
    font, line, gap = _font(size), size * 8 // 5, size // 2
    entries, x, row = [], gap, 0
    for name, colour in classes:
        shown = _cut(name, font, picture.width - 2 * gap - line)
        width = line + int(font.getlength(shown)) + 2 * gap
        if x > gap and x + width > picture.width:
            x, row = gap, row + 1
        entries.append((x, row, shown, colour))
        x += width
    top = picture.height + gap
    canvas = Image.new("RGB", (picture.width, top + (row + 1) * line + gap), "white")
    canvas.paste(picture)
    draw = ImageDraw.Draw(canvas)
    for x, row, shown, colour in entries:
        y = top + row * line
        draw.rectangle((x, y, x + size, y + size), fill=colour, outline="black")
        draw.text((x + line, y + size / 2), shown, fill="black", font=font, anchor="lm")
    return canvas


def _cut(name: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """A name, shortened with "…" if it is wider than `width`."""
    shown = " ".join(name.split())
    while len(shown) > 1 and font.getlength(shown) > width:
        shown = shown[:-2] + "…"
    return shown


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which is part of matplotlib and covers many languages."""
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), size)

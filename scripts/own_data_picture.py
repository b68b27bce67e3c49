"""The picture of docs/own-data.md: held-out photographs beside their predictions.

    python scripts/own_data_picture.py --out docs/images/own-data.jpg FOLDER:OVERLAYS:NAME,NAME …

Each FOLDER holds photographs (in subfolders, too), OVERLAYS what `sdrseg predict --overlays` wrote for them. One row
for each FOLDER.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

HEIGHT, GAP = 190, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="FOLDER:OVERLAYS:NAME,NAME")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = [in_one_row(*map(str, row.split(":"))) for row in given.rows]
    whole = Image.new("RGB", (max(r.width for r in rows), sum(r.height + GAP for r in rows) - GAP), "white")
    top = 0
    for row in rows:
        whole.paste(row, (0, top))
        top += row.height + GAP
    whole.save(given.out, quality=85)


def in_one_row(folder: str, overlays: str, names: str) -> Image.Image:
    """Photograph, overlay, photograph, overlay …"""
    shown = []
    for name in names.split(","):
        for root in (folder, overlays):
            (file,) = (path for path in Path(root).rglob(f"{name}*") if path.suffix in (".jpg", ".png"))
            with Image.open(file) as picture:
                shown.append(picture.convert("RGB"))
    heights = [HEIGHT * b.height // a.height for a, b in zip(shown[::2], shown[1::2], strict=True)]  # with the legend
    shown = [p.resize((HEIGHT * p.width // shown[n - n % 2].height, _high(n, heights))) for n, p in enumerate(shown)]
    row = Image.new("RGB", (sum(p.width + GAP for p in shown) - GAP, max(heights)), "white")
    left = 0
    for picture in shown:
        row.paste(picture, (left, 0))
        left += picture.width + GAP
    return row


def _high(number: int, heights: list[int]) -> int:
    return HEIGHT if number % 2 == 0 else heights[number // 2]


if __name__ == "__main__":
    main()

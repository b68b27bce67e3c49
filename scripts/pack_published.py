"""Pack the published class orders and image lists into the small files that ship with the package and the tests.

    python scripts/pack_published.py tasks.json splits.npz [VOC folder]

The lists are those of fcdl94/MiB (MIT) and LTTM/SDR (Apache-2.0). Written:
  src/sdrseg/resources/orders.json         class lists of the tasks that no rule gives (VOC 19-1b, ADE orders b and c)
  src/sdrseg/resources/ade20k_lists.npz    per ADE task, the step of each of the 20,210 training images (255: none)
  tests/data/voc_lists.npz                 per published VOC list, one bit an image
  tests/data/voc_presence.npz              (with a VOC folder) classes in each of the 12,031 masks, one bit each
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
OUR_NAMES = {"15-5s": "15-1", "10-10s": "10-1", "10-5-5": "10-5", "50": "50-50", "50b": "50-50b", "50c": "50-50c"}


def pack(tasks_file: Path, splits_file: Path) -> None:
    tasks = json.loads(tasks_file.read_text())["tasks"]
    orders = {
        data_set: {OUR_NAMES.get(n, n): steps for n, steps in tasks[key].items() if n[-1] in "bc"}
        for data_set, key in (("voc", "voc"), ("ade20k", "ade"))
    }
    text = json.dumps(orders, indent=1).replace("\n    ", " ").replace("[ ", "[").replace("\n   ]", "]")
    (ROOT / "src/sdrseg/resources/orders.json").write_text(text + "\n")

    lists = np.load(splits_file)
    ade: dict[str, np.ndarray] = {}
    voc: dict[str, np.ndarray] = {}
    for key in lists.files:
        data_set, task, part = key.split("/")
        if data_set == "ade":
            step_of = ade.setdefault(OUR_NAMES.get(task, task), np.full(20210, 255, np.uint8))
            step_of[lists[key]] = int(part.removeprefix("train-"))
        else:
            task, protocol = (task[:-3], "overlapped") if task.endswith("-ov") else (task, "disjoint")
            bits = np.zeros(10582 if part.startswith("train") else 1449, bool)
            bits[lists[key]] = True
            part = part.replace("test_on_val", "test")
            voc[f"{OUR_NAMES.get(task, task)}@{protocol}/{part}"] = np.packbits(bits)
    np.savez_compressed(ROOT / "src/sdrseg/resources/ade20k_lists.npz", **ade)
    np.savez_compressed(ROOT / "tests/data/voc_lists.npz", **voc)


def pack_presence(folder: Path) -> None:
    from sdrseg.datasets.index import class_index
    from sdrseg.datasets.voc import Voc

    source = Voc(folder)
    train, val = class_index(source, "train"), class_index(source, "val")
    np.savez_compressed(
        ROOT / "tests/data/voc_presence.npz",
        train=np.packbits(train.present, axis=0),
        val=np.packbits(val.present, axis=0),
    )


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]))
    if len(sys.argv) > 3:
        pack_presence(Path(sys.argv[3]))

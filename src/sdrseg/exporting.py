"""`sdrseg export`: a model as one ONNX file for images of any size, checked against PyTorch before it is written.

The graph contains everything from pixels to classes: normalisation, padding to the network's stride, the network, and
cropping to the size of the image.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sdrseg import __version__
from sdrseg.datasets.augment import FILL, MEAN, STD, normalise
from sdrseg.datasets.shapes import Shapes
from sdrseg.decision import Decision, scores
from sdrseg.errors import SdrsegError, UsageError, first_line, quantity
from sdrseg.files import atomic_writer, require_writable
from sdrseg.network import SILENT, Network, resize_canvas
from sdrseg.predict.images import find_inputs, read_pixels
from sdrseg.predict.loading import load
from sdrseg.predict.model import Model
from sdrseg.predict.onnx_file import INSTALL, PREFIX, open_session, run_session
from sdrseg.terminal import print_json, print_table
from sdrseg.tiles import framed

FORMATS = ("onnx",)
SIZES = ((32, 32), (33, 47), (64, 64), (65, 129), (200, 150), (512, 512))
"""The sizes of the generated images on which every file is checked."""
LARGEST = 1024  # larger images of --check are cropped to this size in the middle
TOLERANCE = 1e-3  # of the largest logit
OUTPUTS = ["logits", "mask"]
INPUT = "images: uint8 (batch, 3, height, width), RGB, values 0 to 255 as decoded; any height and width from 32 up"
OUTPUT = (
    "logits: float32 (batch, classes, height, width), in the order of classes; the mask has the largest; "
    "mask: uint8 (batch, height, width), ids"
)


class Graph(nn.Module):
    """The exported module: from uint8 images to logits and ids."""

    def __init__(self, network: Network, ids: Sequence[int], decision: Decision):
        super().__init__()
        self.decision: Decision = decision
        self.network = _exportable(network)
        self.mean, self.std = (nn.Buffer(torch.tensor(values)[:, None, None]) for values in (MEAN, STD))
        self.fill = nn.Buffer(torch.tensor(FILL, dtype=torch.float32)[:, None, None])
        self.ids = nn.Buffer(torch.tensor(ids, dtype=torch.uint8))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        height, width = images.shape[-2:]
        size = self.network.padded_size(height, width)
        padded = resize_canvas(images.float() - self.fill, *size) + self.fill  # with the colour that prediction uses
        normalised = (padded / 255 - self.mean) / self.std
        logits = scores(resize_canvas(self.network(normalised).logits, height, width), self.decision)
        return logits, self.ids[logits.argmax(1)]


class AveragePool(nn.Module):
    """nn.AdaptiveAvgPool2d as two matrix products, which work for any size in an exported network (PyTorch's own export
    is correct only for multiples of the number of cells)."""

    def __init__(self, cells: tuple[int, int]):
        super().__init__()
        self.cells = cells

    def forward(self, maps: Tensor) -> Tensor:
        def weights(length: int, cells: int) -> Tensor:
            cell, position = torch.arange(cells)[:, None], torch.arange(length)
            first, end = cell * length // cells, ((cell + 1) * length + cells - 1) // cells
            inside = ((position >= first) & (position < end)).to(maps.dtype)
            return inside / inside.sum(1, keepdim=True)

        height, width = maps.shape[-2:]
        return weights(height, self.cells[0]) @ maps @ weights(width, self.cells[1]).T


def _exportable(network: Network) -> Network:
    """A copy of the network in which pooling to several cells is replaced by the class above."""
    network = copy.deepcopy(network)
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.AdaptiveAvgPool2d):
                size: Any = child.output_size
                rows, columns = size if isinstance(size, tuple) else (size, size)
                if (rows, columns) != (1, 1) and None not in (rows, columns):
                    setattr(module, name, AveragePool((rows, columns)))
    return network


def export_model(
    run: str | Path,
    out: str | Path,
    *,
    format: str = "onnx",
    step: int | None = None,
    check: Sequence[str] = (),
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a model as ONNX after comparing it with PyTorch on images; returns the file and the differences."""
    path, out = Path(run), Path(out)
    if format not in FORMATS:
        raise UsageError(f"--format {format}: use {', '.join(FORMATS)}.")
    if out.suffix.lower() != ".onnx":
        raise UsageError(f"--out {out}: use a name that ends in .onnx.")
    if path.is_file():
        raise SdrsegError(
            f"{path} is a file. Name a run or a step of it, which have the PyTorch weights for the export."
        )
    if out.is_dir() or (out.exists() and not overwrite):
        raise SdrsegError(f"{out} exists. Choose another --out, or add --overwrite.")
    require_writable(out, "Choose another --out.")
    inputs = find_inputs(check) if check else []
    model = load(path, step, "cpu")
    network = model.network
    assert network is not None
    content = _with_metadata(_onnx(network, model), metadata(model))
    report = _compare(network, model, content, [(str(i), read_pixels(i.path)[0]) for i in inputs])
    with atomic_writer(out) as file:
        file.write(content)
    return {
        "file": str(out),
        "bytes": len(content),
        "step": model.facts["step"],
        "note": model.facts["note"],
        **report,
    }


def metadata(model: Model) -> dict[str, Any]:
    """The metadata of an ONNX file; predict needs classes, decision, multiple, crop and batch_size."""
    return {
        "version": __version__,
        **{key: model.facts[key] for key in ("spec", "step", "method", "protocol", "net", "model_sha256")},
        "classes": [c._asdict() for c in model.classes],
        "decision": model.decision,
        "multiple": model.multiple,
        "crop": model.crop,
        "batch_size": model.batch_size,
        "input": INPUT,
        "output": OUTPUT,
    }


def _onnx(network: Network, model: Model) -> Any:
    """The graph as an ONNX protobuf."""
    try:
        import onnxruntime  # noqa: F401 - imported here, so that a missing package is reported first
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise SdrsegError(f"exporting needs onnx, onnxscript and onnxruntime: {INSTALL}") from error
    graph = Graph(network, [c.id for c in model.classes], model.decision).eval()
    example = torch.zeros(2, 3, 70, 90, dtype=torch.uint8)
    level = logging.getLogger("torch.onnx").level
    try:
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            sides = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
            exported = torch.export.export(graph, (example,), dynamic_shapes={"images": sides}, strict=False)
            program = torch.onnx.export(
                exported, dynamo=True, verbose=False, external_data=False, input_names=["images"], output_names=OUTPUTS
            )
        assert program is not None
        return _with_names(program.model_proto)
    except Exception as error:  # the export can fail in many places of PyTorch
        net = model.facts["net"]
        raise SdrsegError(
            f"{net['encoder']} with {net['decoder']} cannot be exported for images of any size: "
            f"{first_line(error)}. Nothing was written. deeplabv3plus with a ResNet works."
        ) from error
    finally:
        logging.getLogger("torch.onnx").setLevel(level)


def _with_names(proto: Any) -> Any:
    """Name the dynamic sizes batch, height and width wherever they occur."""
    sides = proto.graph.input[0].type.tensor_type.shape.dim
    names = {sides[n].dim_param: name for n, name in ((0, "batch"), (2, "height"), (3, "width"))}
    if "" in names or len(names) < 3:
        raise ValueError("the sizes became fixed")
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for side in value.type.tensor_type.shape.dim:
            if side.dim_param:
                side.dim_param = re.sub(r"\w+", lambda m: names.get(m[0], m[0]), side.dim_param)
    return proto


def _with_metadata(proto: Any, facts: dict[str, Any]) -> bytes:
    proto.producer_name, proto.producer_version = "sdrseg", __version__
    proto.doc_string = f"{INPUT}. {OUTPUT}."
    for key, value in facts.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = PREFIX + key, json.dumps(value)
    content: bytes = proto.SerializeToString()
    return content


@torch.inference_mode()
def _compare(network: Network, model: Model, content: bytes, images_to_check: list[tuple[str, Any]]) -> dict[str, Any]:
    """The largest difference of logits between PyTorch and onnxruntime on each image; an error if it is too large."""
    session = open_session(content, "cpu")
    ids = torch.tensor([c.id for c in model.classes], dtype=torch.uint8)
    rows: list[dict[str, Any]] = []
    for name, images in _check_images(images_to_check):
        height, width = images.shape[-2:]
        size = network.padded_size(height, width)
        logits = network(normalise(torch.stack([framed(image, *size) for image in images]))).logits
        expected = scores(logits[..., :height, :width], model.decision)
        found = run_session(session, images, "the exported network")
        mask = torch.from_numpy(session.run(["mask"], {"images": images.numpy()})[0])
        silent = expected < SILENT / 2  # rows of removed classes, whose large logits hide what the others do
        difference = float((expected - found).abs().masked_fill(silent & (found < SILENT / 2), 0).max())
        largest = float(expected.abs().masked_fill(silent, 0).max())
        allowed = max(1e-5, TOLERANCE * largest)
        differing = int((mask != ids[expected.argmax(1)]).sum())
        close = found.shape == expected.shape and difference <= allowed and differing <= 1e-3 * mask.numel()
        rows.append(
            {"image": name, "difference": difference, "largest_logit": largest, "pixels_of_another_class": differing}
        )
        if not close:
            raise SdrsegError(
                f"the exported network differs from PyTorch on {name}: logits differ by {difference:.2g} "
                f"(allowed: {allowed:.2g}), classes in {quantity(differing, 'pixel')}. Nothing was written."
            )
    return {"largest_difference": max(row["difference"] for row in rows), "checked": rows}


def _check_images(images_to_check: list[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Generated scenes of all sizes, in batches of one or two, and the images of --check."""
    for number, (height, width) in enumerate(SIZES):
        scenes = Shapes(size=max(height, width), train=1, val=2)
        batch = [scenes.image(id)[:height, :width] for id in scenes.ids("val")[: 1 + number % 2]]
        yield f"{len(batch)} generated, {width}×{height}", torch.from_numpy(np.stack(batch)).movedim(-1, 1).contiguous()
    for name, pixels in images_to_check:
        top, left = (max(0, (length - LARGEST) // 2) for length in pixels.shape[:2])
        part = pixels[top : top + LARGEST, left : left + LARGEST]
        part = np.pad(part, [(0, max(0, 32 - part.shape[0])), (0, max(0, 32 - part.shape[1])), (0, 0)])
        yield f"{name}, {part.shape[1]}×{part.shape[0]}", torch.from_numpy(part).movedim(-1, 0)[None].contiguous()


def show_export(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    names = ("difference", "largest_logit")
    rows = [[r["image"], *(f"{r[n]:.2g}" for n in names), r["pixels_of_another_class"]] for r in report["checked"]]
    headers = ["image", "largest difference of logits", "largest logit", "pixels of another class"]
    print_table("onnxruntime against PyTorch, both in float32 on the CPU", headers, rows)
    if report["note"]:
        print(f"note: {report['note']}")
    print(f"step {report['step']}, {report['bytes'] / 1e6:.1f} MB: {report['file']}")

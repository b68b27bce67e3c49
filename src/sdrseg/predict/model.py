"""A trained model, ready to segment images: from a run, one of its steps, or an exported ONNX file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdrseg.colours import class_colours
from sdrseg.config import Config, saved_config
from sdrseg.data.augment import normalise
from sdrseg.data.source import Array, Progress
from sdrseg.decision import Decision, decide, read_decision
from sdrseg.decision import probabilities as probabilities_of
from sdrseg.engine.checkpoint import load_entry
from sdrseg.engine.folder import RunFolder
from sdrseg.errors import SdrsegError, first_line
from sdrseg.network import Network, build_network
from sdrseg.predict.images import pixels_of
from sdrseg.predict.prediction import ClassInfo, Prediction
from sdrseg.predict.tiles import Forward, check_tiles, framed, logit_strips, whole_canvas


class Model:
    """Classes, and a network that segments images of any size. `load` makes one."""

    def __init__(
        self,
        classes: tuple[ClassInfo, ...],
        forward: Forward,
        *,
        multiple: int,
        tile: int,
        batch_size: int,
        facts: dict[str, Any],
        decision: Decision = "softmax",
        network: Network | None = None,
    ):
        self.classes = classes
        self.tile, self.batch_size = tile, batch_size
        self.facts = facts
        """Where the model comes from: specification, step, SHA-256 of its weights and so on."""
        self.decision: Decision = decision
        """How logits become a class and probabilities (sdrseg.decision)."""
        self.network = network
        """The PyTorch network; None for an ONNX file."""
        self.multiple = multiple
        self._forward = forward
        self._ids = torch.tensor([c.id for c in classes], dtype=torch.uint8)

    def __repr__(self) -> str:
        return f"<Model of {self.facts.get('spec')}, step {self.facts.get('step')}: {len(self.classes)} classes>"

    @torch.inference_mode()
    def predict(
        self,
        image: object,
        *,
        tile: int | None = None,
        overlap: int | None = None,
        batch_size: int | None = None,
        probabilities: bool = False,
        report: Progress = lambda done, total: None,
    ) -> Prediction:
        """Segment an image: a path, a PIL image, a NumPy array (H, W, 3) or (H, W), a torch tensor (3, H, W), of uint8.

        An image larger than `tile` pixels is cut into tiles that overlap (by a quarter of the tile unless `overlap`
        says otherwise), `batch_size` of them at a time. `report` is called with the rows done and all rows.
        """
        options = self._options(tile, overlap, batch_size)
        return self._predict(pixels_of(image), options, self._forward, probabilities, report)

    @torch.inference_mode()
    def predict_many(
        self,
        images: Sequence[object],
        *,
        tile: int | None = None,
        overlap: int | None = None,
        batch_size: int | None = None,
        probabilities: bool = False,
    ) -> list[Prediction]:
        """Segment several images; those that fit into one tile of the same size go through the network together."""
        options = self._options(tile, overlap, batch_size)
        pixels = [pixels_of(image) for image in images]
        canvases = [whole_canvas(p.shape[0], p.shape[1], options["tile"], self.multiple) for p in pixels]
        answers: dict[int, Tensor] = {}
        for canvas in dict.fromkeys(c for c in canvases if c is not None):
            rows = [row for row, own in enumerate(canvases) if own == canvas]
            for first in range(0, len(rows), options["batch_size"]):
                together = rows[first : first + options["batch_size"]]
                tiles = torch.stack([framed(_tensor(pixels[row]), *canvas) for row in together])
                answers |= dict(zip(together, self._checked(tiles, options), strict=True))
        results = []
        for row, own in enumerate(pixels):
            known = answers.pop(row, None)
            forward = self._forward if known is None else partial(_answered, known)
            results.append(self._predict(own, options, forward, probabilities, lambda done, total: None))
        return results

    def _options(self, tile: int | None, overlap: int | None, batch_size: int | None) -> dict[str, int]:
        tile = self.tile if tile is None else tile
        overlap = tile // 4 if overlap is None else overlap
        check_tiles(tile, overlap)
        return {"tile": tile, "overlap": overlap, "batch_size": max(1, batch_size or self.batch_size)}

    def _predict(
        self, pixels: Array, options: dict[str, int], forward: Forward, probabilities: bool, report: Progress
    ) -> Prediction:
        tensor = _tensor(pixels)
        mask = np.empty(pixels.shape[:2], np.uint8)
        kept = []
        for top, logits in self._strips(tensor, options, forward):
            below = top + logits.shape[1]
            mask[top:below] = self._ids.to(logits.device)[decide(logits, self.decision, 0)].cpu().numpy()
            if probabilities:
                kept.append(probabilities_of(logits, self.decision, 0).cpu().numpy())
            report(below, len(mask))
        if not probabilities:
            return Prediction(mask, self.classes, pixels, partial(self._probabilities, tensor, options))
        whole = np.concatenate(kept, axis=1)
        return Prediction(mask, self.classes, pixels, lambda: whole)

    @torch.inference_mode()
    def _probabilities(self, tensor: Tensor, options: dict[str, int]) -> NDArray[np.float32]:
        strips = self._strips(tensor, options, self._forward)
        each = [probabilities_of(logits, self.decision, 0).cpu().numpy() for _, logits in strips]
        return np.concatenate(each, axis=1)

    def _strips(self, tensor: Tensor, options: dict[str, int], forward: Forward) -> Iterator[tuple[int, Tensor]]:
        try:
            yield from logit_strips(tensor, forward, multiple=self.multiple, **options)
        except torch.OutOfMemoryError as error:
            raise _too_large(options) from error

    def _checked(self, tiles: Tensor, options: dict[str, int]) -> Tensor:
        try:
            return self._forward(tiles)
        except torch.OutOfMemoryError as error:
            raise _too_large(options) from error


def _tensor(pixels: Array) -> Tensor:
    return torch.from_numpy(np.moveaxis(pixels, -1, 0).copy())


def _answered(logits: Tensor, tiles: Tensor) -> Tensor:
    """What the network said about a tile before."""
    return logits[None]


def _too_large(options: dict[str, int]) -> SdrsegError:
    now = f"now {options['tile']} and {options['batch_size']}"
    return SdrsegError(f"out of memory: use smaller tiles or fewer at a time ({now}).")


def load(path: str | Path, step: int | None = None, device: str | torch.device | None = None) -> Model:
    """A model from a run (its last finished step, or `step`), from a step of it (RUN/steps/2), or from an ONNX file.

    `device`: such as "cpu" or "cuda:0"; by default a GPU where there is one.
    """
    path = Path(path)
    if path.is_file():
        from sdrseg.predict.onnx_file import load_onnx

        if path.suffix.lower() != ".onnx":
            raise SdrsegError(f"{path}: not a model. Give the folder of a run, a step of it, or an .onnx file.")
        if step is not None:
            raise SdrsegError(f"{path}: an exported file holds one step; leave out step {step}.")
        return load_onnx(path, device)
    folder, run = find_step(path, step)
    meta = read_meta(folder)
    config = _config_of(run, meta, folder)
    place = find_device(device)
    network = build_network(config.net, len(meta["classes"]))
    remedy = "Copy it again, or train this step and all later ones again."
    tensors = load_entry(folder / "meta.json", meta["files"]["model"], remedy)
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise SdrsegError(
            f"{folder}: the weights do not fit the network that meta.json describes ({error})."
        ) from error
    network.eval().requires_grad_(False).place_on(place)
    return Model(
        class_infos(meta["classes"]),
        _forward(network, place, config.run.precision),
        multiple=network.multiple,
        tile=config.data.crop,
        batch_size=config.eval.batch_size,
        facts={key: meta.get(key) for key in ("spec", "step", "method", "protocol", "net")}
        | {"model_sha256": meta["files"]["model"]["sha256"], "path": str(folder)},
        decision=read_decision(meta.get("decision", "softmax"), folder / "meta.json"),
        network=network,
    )


def class_infos(classes: list[dict[str, Any]]) -> tuple[ClassInfo, ...]:
    """From meta.json, or from the metadata of an ONNX file, in the order of the network's channels."""
    colours = class_colours([c["id"] for c in classes])
    return tuple(ClassInfo(c["id"], c["name"], colour, c["step"]) for c, colour in zip(classes, colours, strict=True))


def find_step(path: Path, step: int | None) -> tuple[Path, Path | None]:
    """The folder of a step, and that of its run (None where a step's folder lies alone)."""
    if not path.exists():
        raise SdrsegError(f"{path}: no such run, step or .onnx file.")
    if (path / "config.json").exists():
        folder = RunFolder(path)
        done = sorted(int(p.name) for p in path.glob("steps/*") if p.name.isdigit() and folder.has_model(int(p.name)))
        if not done:
            raise SdrsegError(f"{path}: no step of this run is finished yet. Wait, or go on training it.")
        if step is not None and step not in done:
            raise SdrsegError(f"{path}: step {step} is not finished; there are {', '.join(map(str, done))}.")
        return folder.step(done[-1] if step is None else step), path
    if (path / "meta.json").exists():
        if step is not None and path.name != str(step):
            raise SdrsegError(f"{path} is one step already; leave out step {step}.")
        above = path.resolve().parent.parent
        return path, above if (above / "config.json").exists() else None
    if path.parent.name == "steps" and path.name.isdigit():
        raise SdrsegError(f"{path}: this step is not finished (there is no meta.json).")
    raise SdrsegError(
        f"{path}: not a run (there is no config.json). Give the folder that was the --out of `sdrseg train`."
    )


def read_meta(folder: Path) -> dict[str, Any]:
    meta = RunFolder(folder).read_json("meta.json")
    if not (
        isinstance(meta, dict) and isinstance(meta.get("classes"), list) and "net" in meta and "model" in meta["files"]
    ):
        raise SdrsegError(f"{folder / 'meta.json'}: does not describe a step of a run. Give RUN or RUN/steps/NUMBER.")
    return meta


def _config_of(run: Path | None, meta: dict[str, Any], folder: Path) -> Config:
    """That of the run; a step's folder alone knows its network, and the rest is as for VOC."""
    if run is None:
        return saved_config({"net": meta["net"]}, str(folder / "meta.json"))
    saved = RunFolder(run).read_json("config.json")
    return saved_config({**saved["config"], "net": meta["net"]}, str(run / "config.json"))


def find_device(wish: str | torch.device | None) -> torch.device:
    """The device of this name, or the best there is."""
    if wish is None:
        best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(best)
    try:
        device = torch.device(wish)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SdrsegError(f"device {wish}: cannot be used ({first_line(error)}). Try cpu, cuda or cuda:0.") from error
    return device


def _forward(network: Network, device: torch.device, precision: str) -> Callable[[Tensor], Tensor]:
    """uint8 tiles to float32 logits, computed with the precision that models are scored with."""
    low = precision == "bf16" or (precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported())

    def forward(tiles: Tensor) -> Tensor:
        images = tiles.to(device, memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            logits: Tensor = network(normalise(images)).logits
        return logits.float()

    return forward

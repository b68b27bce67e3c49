"""Two tiny steps of training for the tests of methods: generated images, the toy encoder, a fixed batch a step."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sdrseg.config import Config, load_config, parse_settings
from sdrseg.datasets.augment import normalise
from sdrseg.datasets.batches import Batch, relabel
from sdrseg.datasets.shapes import Shapes
from sdrseg.distributed import Processes
from sdrseg.engine.bases import base_of
from sdrseg.engine.fit import update
from sdrseg.methods import METHODS, Method, StepInfo, method_layers, own_sections
from sdrseg.methods.base import When
from sdrseg.network import Network, build_network

N_OLD, N_NEW = 7, 2  # background and classes 1..6, then 7 and 8
CLASSES = N_OLD + N_NEW


def make_config(name: str, preset: str = "default", *settings: str) -> Config:
    tiny = ["net.encoder=toy16", "net.decoder=deeplabv3", "optim.lr=0.02", "optim.lr_later=0.01"]
    return load_config(
        "shapes", None, parse_settings([*tiny, *settings]), method_layers(name, preset, None), own_sections(name)
    )


def make_batch(step: int, protocol: str, images: int = 4, size: int = 32) -> Batch:
    """The same images for the same step; later classes are background, old ones too where the protocol masks them."""
    source = Shapes(size=size, train=200)
    wanted = range(1, N_OLD) if step == 0 else range(N_OLD, CLASSES)
    held = [id for id in source.ids("train") if set(source.mask(id).ravel().tolist()) & set(wanted)][:images]
    table = torch.zeros(256, dtype=torch.uint8)
    table[255] = 255
    for c in range(N_OLD if step == 0 else CLASSES):
        table[c] = c if step == 0 or protocol == "sequential" or c >= N_OLD else 0
    pictures = torch.stack([torch.from_numpy(source.image(id)) for id in held]).permute(0, 3, 1, 2)
    masks = torch.stack([torch.from_numpy(source.mask(id)) for id in held])
    outside = torch.zeros(masks.shape, dtype=torch.bool)
    outside[0, :, -8:] = True
    return Batch(pictures, relabel(masks, outside, table), outside, tuple(held))


@dataclass
class Stage:
    """A method in the middle of a step."""

    method: Method
    student: Network
    teacher: Network | None
    batch: Batch
    optimiser: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    terms: list[dict[str, float]] = field(default_factory=list)

    def iterate(self, count: int, bf16: bool = False) -> None:
        weights = self.method.weights()
        for _ in range(count):
            self.optimiser.zero_grad(set_to_none=True)
            terms = self.forward(bf16)
            loss: Tensor = sum(weights.get(n, 1.0) * t for n, t in terms.items())  # type: ignore[assignment]
            loss.backward()
            self.method.after_backward(self.student)
            update(self.optimiser, self.method, self.student)
            self.method.after_update(self.student)
            self.losses.append(loss.item())
            self.terms.append({n: t.item() for n, t in terms.items()})

    @torch.no_grad()
    def look(self, when: When) -> None:
        """The survey before or after fitting, if the method wants it."""
        if self.method.wants_survey(when):
            self.student.eval()
            images = normalise(self.batch.images).to(next(self.student.parameters()).dtype)
            self.method.begin_survey(when)
            seen = None if self.teacher is None else self.teacher(images)
            self.method.survey(self.batch, self.student(images), seen)
            self.method.end_survey(when)
            self.student.train()

    def forward(self, bf16: bool = False) -> dict[str, Tensor]:
        images = normalise(self.batch.images).to(next(self.student.parameters()).dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            output = self.student(images)
            with torch.no_grad():
                seen = None if self.teacher is None else self.teacher(images)
        return self.method.terms(self.method.relabel(self.batch, seen), output, seen)


def begin(
    name: str,
    protocol: str,
    *,
    preset: str = "default",
    settings: tuple[str, ...] = (),
    base_iterations: int = 6,
    base_lr: float | None = None,
    dtype: torch.dtype = torch.float32,
    processes: Processes | None = None,
    lr: float = 0.01,
) -> Stage:
    """Train step 0 a little and stand at the beginning of step 1, batch norm frozen."""
    config = make_config(name, preset, *settings)
    base_type, base_config = base_of(METHODS[name], config)
    key = json.dumps([base_type.name, base_config.to_dict(), protocol, str(dtype), base_iterations, base_lr or lr])
    if key not in _BASES:
        _BASES[key] = _train_base(base_type, base_config, protocol, base_iterations, dtype, base_lr or lr)
    weights, memory, losses = _BASES[key]
    torch.manual_seed(4)
    student = build_network(config.net, N_OLD).to(dtype)
    student.load_state_dict(weights)
    method = METHODS[name](config, processes or Processes(alone=True))
    if METHODS[name].survey is not base_type.survey:
        memory = memory | _surveyed(METHODS[name], config, weights, protocol, dtype)
    method.load_state_dict(copy.deepcopy(memory))
    teacher = None
    if method.needs_teacher:
        teacher = copy.deepcopy(student).eval().requires_grad_(False)
    method.begin_step(StepInfo(1, N_OLD, N_NEW, protocol), student, teacher)
    student.train()
    student.freeze_statistics()
    optimiser = torch.optim.SGD(student.parameters(), lr=lr, momentum=0.9)
    return Stage(method, student, teacher, make_batch(1, protocol), optimiser, losses.copy())


_BASES: dict[str, tuple[dict[str, Tensor], dict[str, Tensor], list[float]]] = {}


def _surveyed(
    method_type: type[Method], config: Config, weights: dict[str, Tensor], protocol: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """What a method adds to the memory of a step 0 that another one trained."""
    student = build_network(config.net, N_OLD).to(dtype)
    method = method_type(config, Processes(alone=True))
    method.begin_step(StepInfo(0, 0, N_OLD, protocol), student, None)
    student.load_state_dict(weights)
    Stage(method, student, None, make_batch(0, protocol), torch.optim.SGD(student.parameters())).look("after")
    return {name: tensor for name, tensor in method.state_dict().items() if not name.startswith("prototypes.")}


def _train_base(
    method_type: type[Method], config: Config, protocol: str, iterations: int, dtype: torch.dtype, lr: float
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Weights, memory and losses of a little step 0."""
    torch.manual_seed(3)
    student = build_network(config.net, N_OLD).to(dtype)
    base = method_type(config, Processes(alone=True))
    base.begin_step(StepInfo(0, 0, N_OLD, protocol), student, None)
    optimiser = torch.optim.SGD(student.parameters(), lr=lr, momentum=0.9)
    stage = Stage(base, student, None, make_batch(0, protocol), optimiser)
    stage.iterate(iterations)
    stage.look("after")
    base.end_step(student)
    return copy.deepcopy(student.state_dict()), copy.deepcopy(base.state_dict()), stage.losses

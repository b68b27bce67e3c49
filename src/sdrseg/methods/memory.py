"""The memory of LAPS between steps: the distribution of the classifier's input for each class. No images, no labels.

`fit` computes from a sample of vectors a mean, a low-rank covariance and a diagonal for each class and for clusters of
background, or keeps vectors as they are. `Replay` turns either into points, drawn again in every iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sdrseg.methods.sample import BACKGROUND, Sample

KEPT = 512  # how many vectors of a class are stored for memory = features


class Gaussians(NamedTuple):
    """A mixture of normal distributions: x = mean + factor · e_1 + √variance · e_2."""

    owner: Tensor  # (M,) channel
    points: Tensor  # (M,) the number of points each represents
    mean: Tensor  # (M, D)
    factor: Tensor  # (M, D, rank)
    variance: Tensor  # (M, D)


def gaussians(vectors: Tensor, owner: int, count: float, rank: int, clusters: int = 1) -> Gaussians:
    """The components of the vectors (N, D) of one class, which represent `count` points. Computed in float64 on the
    CPU, so that every machine gives the same."""
    x = vectors.cpu().double()
    components = []
    group = _cluster(x, min(clusters, len(x)))
    for number in range(int(group.max()) + 1):
        own = x[group == number]
        mean = own.mean(0)
        centred = own - mean
        total = centred.square().mean(0)
        factor = torch.zeros(x.shape[1], rank, dtype=x.dtype)
        if rank > 0 and len(own) > 1:
            values, directions = _leading(centred.T @ centred / len(own), rank)
            factor[:, : len(values)] = directions * values.clamp_min(0).sqrt()
        variance = (total - factor.square().sum(1)).clamp_min(0)
        components.append((torch.tensor(owner), torch.tensor(count * len(own) / len(x)), mean, factor, variance))
    parts = [torch.stack(parts).to(vectors.device) for parts in zip(*components, strict=True)]
    return Gaussians(parts[0], *(part.float() for part in parts[1:]))


def principal(vectors: Tensor, weights: Tensor, number: int) -> Tensor:
    """(number, D): orthonormal directions of the largest variance of weighted vectors (N, D), largest first. Computed
    in float64 on the CPU, so that every machine gives the same."""
    x, share = vectors.cpu().double(), weights.cpu().double() / weights.sum().cpu()
    centred = x - share @ x
    directions = _leading((centred.T * share) @ centred, number)[1]
    return directions.T.flip(0).float().to(vectors.device)


def _leading(covariance: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues (rank,), ascending, and their directions (D, rank), whose largest entry is positive."""
    values, directions = torch.linalg.eigh(covariance)
    kept = min(rank, len(values))
    directions = directions[:, -kept:]
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    return values[-kept:], directions * largest.sign()  # a fixed sign, so that rounding cannot flip it


def _cluster(x: Tensor, clusters: int, rounds: int = 20) -> Tensor:
    """k-means: the cluster of each vector, (N,), numbered without gaps. Starts from vectors spread evenly over x."""
    if clusters < 2:
        return torch.zeros(len(x), dtype=torch.long)
    centres = x[torch.linspace(0, len(x) - 1, clusters).long()]
    for _ in range(rounds):
        near = torch.cdist(x, centres).argmin(1)
        total = torch.zeros_like(centres).index_add_(0, near, x)
        size = torch.bincount(near, minlength=clusters)[:, None]
        centres = torch.where(size > 0, total / size.clamp_min(1), centres)
    used = torch.bincount(near, minlength=clusters) > 0
    return (used.cumsum(0) - 1)[near]


class Vectors(NamedTuple):
    """Stored feature vectors."""

    owner: Tensor  # (M,) channel
    points: Tensor  # (M,) the number of points each represents
    mean: Tensor  # (M, D)


Memory = Gaussians | Vectors
Form = Literal["gaussian", "prototype", "features"]


def follows_relu(memory: Memory) -> bool:
    """Whether the remembered features are never negative: what is drawn or shifted is then clipped at 0."""
    return bool((memory.mean >= 0).all())


def joined(memories: Sequence[Memory]) -> Memory:
    """Several memories of the same form as one."""
    return type(memories[0])(*(torch.cat(parts) for parts in zip(*memories, strict=True)))


class Replay:
    """`each` points from every component of a memory, or its vectors, and the number of data points each stands for."""

    def __init__(self, memory: Memory, each: int):
        self.memory = memory
        self.each = each if isinstance(memory, Gaussians) else 1
        self.owner = memory.owner.repeat_interleave(self.each)
        self.represents = (memory.points / self.each).repeat_interleave(self.each)
        self.points = memory.mean.repeat_interleave(self.each, 0)
        self.clipped = follows_relu(memory)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Draw new points in place: the same in every process, and for the same seed."""
        memory = self.memory
        if not isinstance(memory, Gaussians) or len(memory.owner) == 0:
            return
        generator = torch.Generator(self.points.device).manual_seed(seed)
        points = self.points.normal_(generator=generator).view(len(memory.mean), self.each, -1)
        points *= memory.variance.sqrt()[:, None]
        points += memory.mean[:, None]
        if rank := memory.factor.shape[2]:
            size = (len(memory.mean), self.each, rank)
            points += torch.randn(size, generator=generator, device=points.device) @ memory.factor.mT
        if self.clipped:
            self.points.clamp_(min=0)


def fit(vectors: Tensor, owner: int, count: float, form: Form, rank: int, clusters: int) -> Memory:
    """The memory of the vectors (N, D) of one class, which represent `count` points."""
    if form == "features":
        kept = vectors[: KEPT if owner > 0 else BACKGROUND]
        each = torch.full((len(kept),), count / len(kept), device=kept.device)
        return Vectors(torch.full((len(kept),), owner, device=kept.device), each, kept)
    if form == "prototype":
        rank, clusters = 0, 1
    return gaussians(vectors, owner, count, rank if owner > 0 else 0, clusters if owner == 0 else 1)


def draw_vectors(memory: Memory, number: int, seed: int) -> Tensor:
    """(number, D) vectors, from each component in proportion to its points; the same for the same seed."""
    share = memory.points.cumsum(0) / memory.points.sum().clamp_min(1e-12)
    even = (torch.arange(number, device=share.device) + 0.5) / number
    chosen = torch.searchsorted(share, even).clamp_max(len(share) - 1)
    replay = Replay(type(memory)(*(tensor[chosen] for tensor in memory)), 1)
    replay.draw(seed)
    return replay.points


def weighted_vectors(memory: Memory, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """All stored vectors, or `number` drawn ones, (N, D), with the number of points that each represents, (N,)."""
    if isinstance(memory, Vectors):
        return memory.mean, memory.points
    vectors = draw_vectors(memory, number, seed)
    return vectors, (memory.points.sum() / number).expand(number)


class LatentMemory:
    """Background and old classes, each as Gaussians or as vectors."""

    def __init__(self, form: Form, rank: int, clusters: int):
        self.form, self.rank, self.clusters = form, rank, clusters
        self.background: Memory | None = None
        self.classes: Memory | None = None

    def learn(self, sample: Sample, new: range, seed: int) -> None:
        """Add the background and the new classes of a step."""
        options = (self.form, self.rank, self.clusters)
        seen = [(c, sample.of(c)) for c in new]
        parts = [] if self.classes is None else [self.classes]
        parts += [fit(x, c, float(sample.counts[c]), *options) for c, x in seen if len(x) > 0]
        self.classes = joined(parts) if parts else None
        self._learn_background(sample.of(0), float(sample.counts[0]), seed)

    def _learn_background(self, x: Tensor, count: float, seed: int) -> None:
        """Add vectors (N, D) of background that represent `count` points. Above BACKGROUND vectors, those of earlier
        steps and these are thinned in proportion to their points."""
        options = (self.form, self.rank, self.clusters)
        stored = self.background
        if stored is None or len(x) == 0:
            self.background = fit(x, 0, count, *options) if len(x) > 0 else stored
            return
        before = float(stored.points.sum())
        most = round(BACKGROUND * before / max(1.0, before + count))
        if isinstance(stored, Vectors):
            if len(stored.mean) > most:
                drawn = draw_vectors(stored, most, seed)
                each = torch.full((most,), before / max(1, most), device=x.device)
                stored = Vectors(torch.zeros_like(each, dtype=stored.owner.dtype), each, drawn)
            new = fit(x[: max(1, BACKGROUND - len(stored.mean))], 0, count, *options)
            self.background = joined([stored, new])
        else:
            x = x[: max(1, BACKGROUND - most)]
            old = min(most, round(len(x) * before / max(1.0, count)))
            self.background = fit(torch.cat([draw_vectors(stored, old, seed), x]), 0, before + count, *options)

    def drift(self, shift: Tensor) -> None:
        """Shift the memory of each class by `shift` (K, D)."""
        if self.classes is not None:
            moved = self.classes.mean + shift[self.classes.owner]
            self.classes = self.classes._replace(mean=moved.clamp_min(0) if follows_relu(self.classes) else moved)

    def parts(self) -> dict[str, Memory]:
        both = {"background": self.background, "classes": self.classes}
        return {name: part for name, part in both.items() if part is not None}

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.parts())

    def filled(self, classes: int, channels: int) -> LatentMemory:
        """A memory of this form for background and `classes` classes with random features, to measure its size."""
        options = (self.form, self.rank, self.clusters)
        other = LatentMemory(*options)
        points = {"gaussian": self.clusters, "prototype": 1, "features": BACKGROUND}[self.form]
        other.background = fit(torch.rand(points, channels), 0, 1.0, *options)
        other.classes = joined([fit(torch.rand(KEPT, channels), c + 1, 1.0, *options) for c in range(classes)])
        return other

    def state_dict(self) -> dict[str, Tensor]:
        return {f"memory.{n}.{k}": t for n, part in self.parts().items() for k, t in part._asdict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        parts = {name: self._in_this_form(part) for name, part in parts_of(state).items()}
        self.background, self.classes = parts.get("background"), parts.get("classes")

    def _in_this_form(self, memory: Memory) -> Memory:
        """A memory of another form, such as that of a model that is extended with other settings, fitted again."""
        if isinstance(memory, Vectors):
            fits = self.form == "features"
        else:
            rank = self.rank if self.form == "gaussian" and memory.owner.any() else 0
            fits = self.form != "features" and memory.factor.shape[2] == rank
        if fits:
            return memory
        fitted = []
        for owner in sorted(set(memory.owner.tolist())):
            own = type(memory)(*(tensor[memory.owner == owner] for tensor in memory))
            vectors, points = weighted_vectors(own, KEPT if owner > 0 else BACKGROUND, seed=owner)
            fitted.append(fit(vectors, owner, float(points.sum()), self.form, self.rank, self.clusters))
        return joined(fitted)


def parts_of(state: Mapping[str, Tensor]) -> dict[str, Memory]:
    """The memory of background and of the classes in the state of a method, if there is one."""
    read = {name: _read(state, f"memory.{name}.") for name in ("background", "classes")}
    return {name: part for name, part in read.items() if part is not None}


def nbytes_of(parts: Mapping[str, Memory]) -> int:
    return sum(tensor.nbytes for part in parts.values() for tensor in part)


def _read(state: Mapping[str, Tensor], prefix: str) -> Memory | None:
    found = {name.removeprefix(prefix): tensor.clone() for name, tensor in state.items() if name.startswith(prefix)}
    if not found or len(found["owner"]) == 0:
        return None
    return Gaussians(**found) if "factor" in found else Vectors(**found)

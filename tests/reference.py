"""Every loss once more, slowly: float64 and explicit loops over images, pixels, classes and channels.

Written from the equations of docs/specification.md, sections 3 and 4, to check the vectorised losses; it shares no code
with them. Features F (B, C, h, w), logits z (B, K, H, W), teacher logits t (B, n_old, H, W), labels y (B, H, W) or on
the grid (B, h, w); 255 is void.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Labels = NDArray[np.integer]
VOID = 255


# Small pieces


def positions(y: NDArray) -> Iterator[tuple[int, int, int]]:
    images, height, width = y.shape
    for b in range(images):
        for i in range(height):
            for j in range(width):
                yield b, i, j


def logsumexp(values: list[float]) -> float:
    top = max(values)
    return top + math.log(sum(math.exp(v - top) for v in values))


def softmax(values: list[float]) -> list[float]:
    total = logsumexp(values)
    return [math.exp(v - total) for v in values]


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


def norm(v: Array) -> float:
    return math.sqrt(sum(float(x) ** 2 for x in v))


def everywhere(y: NDArray) -> NDArray:
    return np.ones(y.shape, bool)


# Cross-entropy (3.2)


def cross_entropy(z: Array, y: Labels, *, count_void: bool = False) -> float:
    total, count = 0.0, 0
    for b, i, j in positions(y):
        label = int(y[b, i, j])
        if label != VOID:
            total -= math.log(softmax(list(z[b, :, i, j]))[label])
        count += label != VOID or count_void
    return total / max(count, 1)


def unbiased_cross_entropy(z: Array, y: Labels, n_old: int, *, count_void: bool = False) -> float:
    total, count = 0.0, 0
    for b, i, j in positions(y):
        label = int(y[b, i, j])
        if label != VOID:
            q = softmax(list(z[b, :, i, j]))
            total -= math.log(sum(q[:n_old]) if label < n_old else q[label])
        count += label != VOID or count_void
    return total / max(count, 1)


def binary_cross_entropy(z: Array, y: Labels) -> float:
    """LwF-MC: void is zero, yet in the mean."""
    total = 0.0
    for b, i, j in positions(y):
        if y[b, i, j] != VOID:
            for c in range(z.shape[1]):
                s = sigmoid(z[b, c, i, j])
                total -= math.log(s) if c == y[b, i, j] else math.log(1 - s)
    return total / y.size


# Distillation (3.2, 3.4)


def distillation(z: Array, t: Array, keep: NDArray, *, alpha: float = 1.0) -> float:
    n_old, total = t.shape[1], 0.0
    for b, i, j in positions(keep):
        if keep[b, i, j]:
            p, q = softmax([alpha * v for v in t[b, :, i, j]]), softmax(list(z[b, :n_old, i, j]))
            total -= sum(p[c] * math.log(q[c]) for c in range(n_old)) / n_old
    return total / max(int(keep.sum()), 1)


def unbiased_distillation(z: Array, t: Array, keep: NDArray, *, alpha: float = 1.0) -> float:
    n_old, total = t.shape[1], 0.0
    for b, i, j in positions(keep):
        if keep[b, i, j]:
            p, q = softmax([alpha * v for v in t[b, :, i, j]]), softmax(list(z[b, :, i, j]))
            total -= p[0] * math.log(q[0] + sum(q[n_old:])) / n_old
            total -= sum(p[c] * math.log(q[c]) for c in range(1, n_old)) / n_old
    return total / max(int(keep.sum()), 1)


def binary_distillation(z: Array, t: Array, keep: NDArray) -> float:
    """n_old times the mean, over pixels and old channels, of BCE(sigmoid(z), sigmoid(t))."""
    n_old, total = t.shape[1], 0.0
    for b, i, j in positions(keep):
        if keep[b, i, j]:
            for c in range(n_old):
                s, target = sigmoid(z[b, c, i, j]), sigmoid(t[b, c, i, j])
                total -= target * math.log(s) + (1 - target) * math.log(1 - s)
    return n_old * total / max(int(keep.sum()) * n_old, 1)


def cil(z: Array, t: Array, y: Labels, keep: NDArray, *, entropy_weight: float = 1.0) -> float:
    n_old, total, count = t.shape[1], 0.0, 0
    for b, i, j in positions(y):
        if keep[b, i, j] and y[b, i, j] in (0, VOID):
            p, q = softmax(list(t[b, :, i, j])), softmax(list(z[b, :, i, j]))
            bits = -sum(v * math.log2(v) for v in p)
            total -= (1 + entropy_weight * bits) * sum(p[c] * math.log(q[c]) for c in range(n_old))
            count += 1
    return total / max(count, 1)


def encoder_distillation(F: Array, teacher: Array, keep: NDArray) -> float:
    channels, total = F.shape[1], 0.0
    for b, i, j in positions(keep):
        if keep[b, i, j]:
            total += sum((F[b, c, i, j] - teacher[b, c, i, j]) ** 2 for c in range(channels))
    return total / max(int(keep.sum()) * channels, 1)


# The grid, class means and prototypes (0, 4.1, 4.2)


def to_grid(y: NDArray, h: int, w: int, stride: int, outside: float) -> NDArray:
    """y*[i, j] = y[stride i, stride j]; what lies beyond the image is `outside`."""
    out = np.full((*y.shape[:-2], h, w), outside, y.dtype)
    for i in range(h):
        for j in range(w):
            if stride * i < y.shape[-2] and stride * j < y.shape[-1]:
                out[..., i, j] = y[..., stride * i, stride * j]
    return out


def pseudo_labels(y_star: Labels, t: Array, stride: int) -> Labels:
    """Where y* is background: the teacher's argmax at full resolution, then on the grid. Elsewhere y*."""
    full = np.zeros((t.shape[0], *t.shape[2:]), np.int64)
    for b, i, j in positions(full):
        values = list(t[b, :, i, j])
        full[b, i, j] = values.index(max(values))
    seen = to_grid(full, *y_star.shape[1:], stride, 0)
    out = y_star.astype(np.int64)
    for b, i, j in positions(y_star):
        if y_star[b, i, j] == 0:
            out[b, i, j] = seen[b, i, j]
    return out


def features_of(F: Array, y: Labels, c: int, image: int | None = None) -> list[Array]:
    return [F[b, :, i, j] for b, i, j in positions(y) if y[b, i, j] == c and image in (None, b)]


def class_mean(F: Array, y: Labels, c: int, average: str) -> tuple[Array | None, int]:
    """The mean feature of a class and how many pixels, or images, it is the mean of."""
    if average == "pixel":
        vectors = features_of(F, y, c)
    else:
        images = [features_of(F, y, c, b) for b in range(len(F))]
        vectors = [sum(vs) / len(vs) for vs in images if vs]
    return (sum(vectors) / len(vectors), len(vectors)) if vectors else (None, 0)


def running_prototypes(
    batches: list[tuple[Array, Labels]], classes: int, average: str, take: list[bool], decay: float | None = None
) -> tuple[Array, Labels]:
    """p_c and m_c after several batches: the mean of all seen, or p ← (1 − β) p + β p̂ from the second p̂ on."""
    channels = batches[0][0].shape[1]
    p, seen = np.zeros((classes, channels)), np.zeros(classes, np.int64)
    for F, y in batches:
        for c in range(classes):
            current, count = class_mean(F, y, c, average)
            if current is None or not take[c]:
                continue
            if decay is None:
                p[c] = (seen[c] * p[c] + count * current) / (seen[c] + count)
            else:
                p[c] = current if seen[c] == 0 else (1 - decay) * p[c] + decay * current
            seen[c] += count
    return p, seen


# Matching, attraction, repulsion (4.3, 4.4)


def matching(
    F: Array,
    pseudo: Labels,
    p: Array,
    seen: Labels,
    n_old: int,
    *,
    average: str = "image",
    distance: str = "mse",
    normaliser: str = "present",
    background: bool = False,
) -> float:
    total, present = 0.0, 0
    for c in range(0 if background else 1, n_old):
        current, _ = class_mean(F, pseudo, c, average)
        if current is None or seen[c] == 0:
            continue
        present += 1
        d = p[c] - current
        if distance == "mse":
            total += sum(float(v) ** 2 for v in d) / len(d)
        elif distance == "frobenius":
            total += norm(d)
        else:
            dot = sum(float(a * b) for a, b in zip(p[c], current, strict=True))
            total += 1 - (dot / (norm(p[c]) * norm(current)) if dot else 0)
    return total / max(present if normaliser == "present" else n_old, 1)


def attraction(F: Array, y: Labels, p: Array, seen: Labels, take: list[bool], kind: str = "mse") -> float:
    """`kind`: mse (mean over pixels and channels), norm_sum (Eq. 6 as printed) or norm_mean."""
    total, present = 0.0, 0
    for c in range(len(p)):
        vectors = features_of(F, y, c)
        if not vectors or not take[c] or seen[c] == 0:
            continue
        present += 1
        norms = [norm(f - p[c]) for f in vectors]
        if kind == "mse":
            total += sum(n**2 for n in norms) / (len(norms) * F.shape[1])
        else:
            total += sum(norms) / (len(norms) if kind == "norm_mean" else 1)
    return total / max(present, 1)


def attraction_by_image(F: Array, y: Labels, p: Array, seen: Labels, take: list[bool], kind: str = "mse") -> float:
    """Eq. 6 read image by image: the mean over images that hold a class which takes part."""
    images = [
        attraction(F[b : b + 1], y[b : b + 1], p, seen, take, kind)
        for b in range(len(F))
        if any(c != VOID and take[c] and seen[c] > 0 for c in y[b].ravel())
    ]
    return sum(images) / max(len(images), 1)


def smallest_gap(p: Array, seen: Labels) -> float:
    known = [c for c in range(len(p)) if seen[c] > 0]
    return min((norm(p[j] - p[k]) for j in known for k in known if j != k), default=math.inf)


def repulsion(F: Array, y: Labels, take: list[bool], *, average: str = "image", normaliser: str = "classes") -> float:
    means = {c: class_mean(F, y, c, average)[0] for c in range(len(take)) if take[c]}
    present = [c for c, m in means.items() if m is not None]
    total = 0.0
    for j in present:
        for k in present:
            if j != k:
                total += 1 / norm(means[j] - means[k])
    count = len(present)
    return total / max(count if normaliser == "classes" else count * (count - 1), 1)


def repulsion_from_nearest(F: Array, y: Labels, p: Array, seen: Labels, take: list[bool]) -> float:
    values = []
    for j in range(len(take)):
        mean = class_mean(F, y, j, "image")[0] if take[j] else None
        others = [k for k in range(len(take)) if k != j and take[k] and seen[k] > 0]
        if mean is not None and others:
            values.append(1 / min(norm(mean - p[k]) for k in others))
    return sum(values) / max(len(values), 1)


# Sparsity (4.5)


def class_maximum(F: Array, y: Labels, c: int, image: int | None) -> float:
    return max((float(v) for f in features_of(F, y, c, image) for v in f), default=0.0)


def exponential_ratio(f: list[float]) -> float:
    return sum(math.exp(v) for v in f) / sum(f)


def sparsity(F: Array, y: Labels, variant: str, scope: str = "image") -> float:
    """The mean over positions that are not void; `scope` of the class maximum: within the image or the batch.

    A position with a sum below 1e-6 has no ratio and no share of its sum: it is skipped, in the mean as well.
    """
    total, count = 0.0, 0
    maxima = {
        (b, c): class_maximum(F, y, c, b if scope == "image" else None) for b in range(len(F)) for c in set(y.ravel())
    }
    overall = max((class_maximum(F, y, c, None) for c in set(y.ravel()) if c != VOID), default=0.0)
    for b, i, j in positions(y):
        label = int(y[b, i, j])
        f = [float(v) for v in F[b, :, i, j]]
        if label == VOID or (sum(f) < 1e-6 and variant not in ("l0", "l1", "entropy_softmax")):
            continue
        count += 1
        largest = maxima[b, label]
        if variant == "class_max":
            total += exponential_ratio([v / largest for v in f])
        elif variant == "norm_max":
            total += exponential_ratio([v / max(f) for v in f])
        elif variant == "norm_max_overall":
            total += exponential_ratio([v / overall for v in f])
        elif variant == "norm_l2":
            total += exponential_ratio([v / norm(F[b, :, i, j]) for v in f])
        elif variant in ("power2", "power3"):
            bar = [v / largest for v in f]
            total += sum(v ** int(variant[-1]) for v in bar) / sum(bar)
        elif variant == "entropy_l1":
            bar = [v / sum(f) for v in f]
            total -= sum(v * math.log(v + 1e-10) for v in bar)
        elif variant == "entropy_softmax":
            total -= sum(v * math.log(v + 1e-10) for v in softmax(f))
        elif variant == "l0":  # the surrogate that is trained with
            total += sum(1 - math.exp(-v / (0.1 * largest)) for v in f) if largest > 1e-6 else 0
        elif variant == "l1":
            total += sum(abs(v) for v in f)
        else:
            raise ValueError(variant)
    return total / max(count, 1)


def hoyer(F: Array, y: Labels) -> float:
    """Hoyer's sparsity (√C − ‖f‖₁/‖f‖₂)/(√C − 1), the mean over positions that are not void."""
    root, values = math.sqrt(F.shape[1]), []
    for b, i, j in positions(y):
        if y[b, i, j] != VOID:
            f = F[b, :, i, j]
            if norm(f) > 1e-6:
                values.append((root - sum(abs(float(v)) for v in f) / norm(f)) / (root - 1))
    return sum(values) / max(len(values), 1)


def active(F: Array, y: Labels) -> float:
    counts = [sum(float(v) > 0 for v in F[b, :, i, j]) for b, i, j in positions(y) if y[b, i, j] != VOID]
    return sum(counts) / max(len(counts), 1)


# The official code, bugs included (4.1 to 4.5, 3.4)


def gathered(F: Array, y: Labels, c: int) -> list[float]:
    """A boolean index of the whole (B, C, h, w) tensor: the values in the order image, channel, row, column."""
    images, channels, height, width = F.shape
    return [
        float(F[b, channel, i, j])
        for b in range(images)
        for channel in range(channels)
        for i in range(height)
        for j in range(width)
        if y[b, i, j] == c
    ]


def official_scrambled(F: Array, y: Labels, c: int) -> Array:
    """Bug A: reshaped to (C, n) as though all came from one image."""
    values = gathered(F, y, c)
    n = len(values) // F.shape[1]
    return np.array([[values[channel * n + k] for k in range(n)] for channel in range(F.shape[1])])


def official_classes(y: Labels) -> list[int]:
    return sorted({int(c) for c in y.ravel()} - {VOID})


def official_prototypes(p: Array, seen: Labels, F: Array, y: Labels, drop_smallest: bool) -> tuple[Array, Labels]:
    """The cumulative pixel mean with bug A; bug B drops the smallest id present in place of background."""
    p, seen = p.copy(), seen.copy()
    for c in official_classes(y)[1 if drop_smallest else 0 :]:
        values = official_scrambled(F, y, c)
        n = values.shape[1]
        for channel in range(F.shape[1]):
            p[c, channel] = (sum(values[channel]) + seen[c] * p[c, channel]) / (seen[c] + n)
        seen[c] += n
    return p, seen


def official_matching(F: Array, pseudo: Labels, p: Array) -> float:
    """Bug C: the values reshaped to (n, C), then averaged over n."""
    channels, total = F.shape[1], 0.0
    classes = [c for c in official_classes(pseudo) if c > 0]
    for c in classes:
        values = gathered(F, pseudo, c)
        n = len(values) // channels
        for channel in range(channels):
            mean = sum(values[k * channels + channel] for k in range(n)) / n
            total += (p[c, channel] - mean) ** 2 / channels
    return total / max(len(classes), 1)


def official_attraction(F: Array, y: Labels, p: Array) -> float:
    """Bug D: divided by the number of classes after each class. Bug A."""
    classes, total = official_classes(y), 0.0
    for c in classes:
        values = official_scrambled(F, y, c)
        squares = [(values[a, b] - p[c, a]) ** 2 for a in range(values.shape[0]) for b in range(values.shape[1])]
        total = (total + sum(squares) / len(squares)) / len(classes)
    return total


def official_repulsion(F: Array, y: Labels) -> float:
    """The mean over ordered pairs of means with bug A, in exact arithmetic (so without bug E)."""
    means = [np.array([sum(row) / len(row) for row in official_scrambled(F, y, c)]) for c in official_classes(y)]
    inverse = [1 / norm(a - b) for j, a in enumerate(means) for k, b in enumerate(means) if j != k]
    return sum(inverse) / max(len(inverse), 1)


def official_sparsity(F: Array, y: Labels, variant: str = "class_max") -> float:
    """The official code, position by position. Void is a class like any other; denominators + 1e-15 (norms at least
    1e-12); 0 where everything is 0 after the normalisation, as it is by class maxima where all is background."""
    only_background = {int(c) for c in y.ravel()} == {0}
    bars = []
    for b, i, j in positions(y):
        f = [float(v) for v in F[b, :, i, j]]
        if variant == "norm_l2":
            scale = max(math.sqrt(sum(v * v for v in f)), 1e-12)
        elif variant == "entropy_l1":
            scale = max(sum(abs(v) for v in f), 1e-12)
        elif variant == "entropy_softmax":
            f = [math.exp(v) for v in f]
            scale = sum(f)
        elif variant in ("norm_max", "norm_max_overall"):
            scale = (max(f) if variant == "norm_max" else float(F.max())) + 1e-15
        elif only_background:
            scale = math.inf
        else:
            scale = class_maximum(F, y, int(y[b, i, j]), None) + 1e-15
        bars.append([v / scale for v in f])
    if sum(map(sum, bars)) == 0:
        return 0.0
    if variant.startswith("entropy"):
        return sum(-v * math.log(v + 1e-10) for bar in bars for v in bar) / y.size
    shrunk = {"power2": lambda v: v * v, "power3": lambda v: v**3}.get(variant, math.exp)
    return sum(sum(map(shrunk, bar)) / (sum(bar) + 1e-15) for bar in bars) / y.size


def official_lasso(F: Array) -> float:
    return 0.5 * sum(abs(float(v)) for v in F.ravel())


def official_cil(z: Array, t: Array, y: Labels) -> float:
    """The teacher's logits padded with zeros; the student's softmax without logarithm, and without a minus."""
    padding, total, count = z.shape[1] - t.shape[1], 0.0, 0
    for b, i, j in positions(y):
        if y[b, i, j] in (0, VOID):
            p, q = softmax(list(t[b, :, i, j]) + [0.0] * padding), softmax(list(z[b, :, i, j]))
            bits = -sum(v * math.log2(v + 1e-8) for v in p)
            total += (1 + bits) * sum(a * b for a, b in zip(p, q, strict=True))
            count += 1
    return total / max(count, 1)

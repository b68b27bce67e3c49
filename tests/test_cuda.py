"""What can only be seen on a GPU: no host synchronisation, and the cache's batched views."""

from __future__ import annotations

import random

import pytest
import torch

from sdrseg.config import load_config
from sdrseg.data.augment import AUGMENTATIONS, crop512, normalise, show
from sdrseg.data.augment import padding as padding_of
from sdrseg.data.batches import Batch, Cached
from sdrseg.data.cache import PixelCache
from sdrseg.engine.watch import Watch
from sdrseg.methods import METHODS, StepInfo, method_layers
from sdrseg.network import build_network

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def no_synchronisation():
    """Inside, any operation that makes the host wait for the device is an error."""

    class Guard:
        def __enter__(self):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    return Guard()


def random_batch(classes: int, n_old: int, size: int = 128) -> Batch:
    labels = torch.randint(0, classes, (4, size, size), dtype=torch.uint8, device="cuda")
    labels[labels < n_old] = 0
    labels[:, :9, :9] = 255
    outside = torch.zeros(4, size, size, dtype=torch.bool, device="cuda")
    outside[0, :, size // 2 :] = True
    images = torch.randint(0, 256, (4, 3, size, size), dtype=torch.uint8, device="cuda")
    return Batch(images, labels.masked_fill(outside, 255), outside, tuple("abcd"))


@pytest.mark.parametrize("name", [n for n in METHODS if not n.startswith(("ablation", "sparsity"))] + ["sparsity-l0"])
@pytest.mark.parametrize("protocol", ["sequential", "disjoint"])
def test_no_term_makes_the_host_wait(name, protocol, no_synchronisation):
    config = load_config("shapes", between=method_layers(name, "default", None))
    torch.manual_seed(0)
    student = build_network(config.net, 5).cuda()
    teacher = build_network(config.net, 5).cuda().eval().requires_grad_(False)
    method = METHODS[name](config)
    if METHODS[name].own_step0:
        method.begin_step(StepInfo(0, 0, 5, protocol), student, None)
        method.end_step(student)
    method.begin_step(StepInfo(1, 5, 2, protocol), student, teacher)
    batch = random_batch(7, 5)
    weights = method.weights()
    watch = Watch(1, 1000, None, lambda entry: None, 1000, 1e9)
    optimiser = torch.optim.SGD(student.parameters(), lr=1e-3, momentum=0.9, nesterov=True)

    def iteration() -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            images = normalise(batch.images)
            output = student(images)
            with torch.no_grad():
                seen = teacher(images)
        terms = method.terms(batch, output, seen)
        loss = sum(weights.get(n, 1.0) * term for n, term in terms.items())
        loss.backward()
        watch.add(terms, loss)
        method.after_backward(student)
        optimiser.step()
        method.after_update(student)
        watch.end_iteration(batch, dict)

    for _ in range(12):  # the first ones load kernels; every tenth updates RW's score
        iteration()
    with no_synchronisation:
        for _ in range(12):
            iteration()
    assert torch.isfinite(torch.cat([p.flatten() for p in student.parameters()])).all()


def test_views_on_the_gpu_equal_torchvision_on_the_cpu(no_synchronisation):
    torch.manual_seed(1)
    sizes = {"a": (375, 500), "b": (500, 333), "c": (61, 500), "d": (500, 500)}
    pictures = {
        id: (torch.randint(0, 256, (*size, 3), dtype=torch.uint8), torch.randint(0, 22, size, dtype=torch.uint8))
        for id, size in sizes.items()
    }
    cache = PixelCache(sizes, pictures.values(), "cuda")
    for seed in range(6):
        name = ("scale_crop", "rrc")[seed % 2]
        views = [AUGMENTATIONS[name](sizes[id], 512, (0.5, 2.0), random.Random(f"{seed}{id}")) for id in sizes]
        if seed == 4:
            views = [crop512(size) for size in sizes.values()]
        images, masks, outside = (t.cpu() for t in cache.show(list(sizes), views))
        for k, id in enumerate(sizes):
            image, mask = pictures[id]
            expected, label = show(views[k], image.permute(2, 0, 1), mask)
            assert (images[k].int() - expected.int()).abs().max() <= 1
            assert torch.equal(masks[k], label)
            assert torch.equal(outside[k], padding_of(views[k]))


def test_cached_batches_make_the_host_wait_for_nothing(no_synchronisation):
    sizes = {str(i): (100 + i, 120) for i in range(8)}
    made = [
        (torch.randint(0, 256, (*s, 3), dtype=torch.uint8), torch.zeros(s, dtype=torch.uint8)) for s in sizes.values()
    ]
    cache = PixelCache(sizes, made, "cuda")
    config = load_config("voc")

    def choose(size, epoch, id):
        return AUGMENTATIONS["scale_crop"](size, 128, config.data.scale, random.Random(id))

    samples = Cached(cache, list(sizes), torch.arange(256, dtype=torch.uint8).numpy(), choose)
    samples.batch([(0, i) for i in range(8)])
    with no_synchronisation:
        samples.batch([(0, i) for i in range(8)])

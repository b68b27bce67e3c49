"""What can only be seen on a GPU: no host synchronisation, and the cache's batched views."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from runs import deterministic_algorithms
from sdrseg.config import load_config, parse_settings
from sdrseg.datasets.augment import AUGMENTATIONS, crop512, normalise, show
from sdrseg.datasets.augment import padding as padding_of
from sdrseg.datasets.batches import Augmented, Batch, Cached
from sdrseg.datasets.cache import PixelCache
from sdrseg.engine.checkpoint import load_optimiser, load_tensors, optimiser_tensors, save_tensors
from sdrseg.engine.launch import make_fabric
from sdrseg.engine.optimiser import make_optimiser
from sdrseg.engine.passes import GraphPass, Pass
from sdrseg.engine.speed import make_pass
from sdrseg.engine.watch import NoLog, Watch
from sdrseg.methods import METHODS, Method, StepInfo, method_layers, own_sections
from sdrseg.network import Network, build_network

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)


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
    config = load_config("shapes", between=method_layers(name, "default", None), own=own_sections(name))
    torch.manual_seed(0)
    student = build_network(config.net, 5).place_on(GPU)
    teacher = build_network(config.net, 5).place_on(GPU).eval().requires_grad_(False)
    method = METHODS[name](config)
    if METHODS[name].own_step0:
        method.begin_step(StepInfo(0, 0, 5, protocol), student, None)
        method.end_step(student)
    method.begin_step(StepInfo(1, 5, 2, protocol), student, teacher)
    batch = random_batch(7, 5)
    weights = method.weights()
    watch = Watch(1, 1000, NoLog(), lambda entry: None, 1000, 1e9)
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
    cache = PixelCache(sizes, "cuda")
    for id, (image, mask) in pictures.items():
        cache.store(id, image.numpy(), mask.numpy())
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
    cache = PixelCache(sizes, "cuda")
    for id, size in sizes.items():
        cache.store(id, torch.randint(0, 256, (*size, 3), dtype=torch.uint8).numpy(), np.zeros(size, np.uint8))
    choose = Augmented(load_config("voc", None, {"data.crop": 128}))
    samples = Cached(cache, list(sizes), torch.arange(256, dtype=torch.uint8).numpy(), choose)
    samples.batch([(0, i) for i in range(8)])
    with no_synchronisation:
        samples.batch([(0, i) for i in range(8)])


@pytest.fixture
def deterministic():
    with deterministic_algorithms():
        yield


def trained(name: str, speed: str, protocol: str, step0: bool = False, *more: str) -> dict[str, torch.Tensor]:
    """Weights and memory after nine iterations on changing batches."""
    settings = [f"run.speed={speed}", "optim.lr_later=1e-4", *more]  # random, with frozen statistics, it bears no more
    config = load_config(
        "shapes", None, parse_settings(settings), method_layers(name, "default", None), own_sections(name)
    )
    fabric = make_fabric(config)
    torch.manual_seed(0)

    def network() -> Network:
        made = build_network(config.net, 5).place_on(GPU)
        for _ in range(30 if more else 0):  # batch norm has to know what comes, or large networks overflow
            with torch.no_grad():
                made.train()(normalise(random_batch(5, 0).images))
        return made

    student, teacher = network(), None
    method = METHODS[name](config)
    if step0 or METHODS[name].own_step0:
        method.begin_step(StepInfo(0, 0, 5, protocol), student, None)
    if not step0:
        if METHODS[name].own_step0:
            method.end_step(student)
        if method.needs_teacher:
            teacher = network().eval().requires_grad_(False)
        method.begin_step(StepInfo(1, 5, 2, protocol), student, teacher)
        student.freeze_statistics()
    student.train()
    said: list[str] = []
    wrapped, optimiser = fabric.setup(student, make_optimiser(student, method, config.of_step(1)))
    compute = make_pass(fabric, method, wrapped, teacher, config, 0, said.append)
    assert isinstance(compute, GraphPass) == (speed == "graph")
    for _ in range(9):
        batch = random_batch(5 if step0 else 7, 0 if step0 else 5)
        compute.zero_gradients()
        passed = compute(batch)
        method.after_backward(student)
        optimiser.step()
        method.after_update(student)
    assert not any("no CUDA graph" in text for text in said), said
    result = {f"weight {n}": t for n, t in student.state_dict().items()}
    result |= {f"memory {n}": t for n, t in method.state_dict().items()}
    return result | {f"term {n}": t for n, t in passed.terms.items()}


@pytest.mark.parametrize("name", [n for n in METHODS if not n.startswith(("ablation", "sparsity"))] + ["sparsity-l0"])
@pytest.mark.parametrize("stage", ["step 0", "sequential", "disjoint"])
def test_a_replayed_pass_equals_the_plain_one_bit_for_bit(name, stage, deterministic):
    protocol = "disjoint" if stage == "step 0" else stage
    plain, graph = (trained(name, speed, protocol, stage == "step 0") for speed in ("plain", "graph"))
    assert plain.keys() == graph.keys()
    for key in plain:
        assert torch.equal(plain[key], graph[key]), key


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("stage", ["step 0", "disjoint"])
def test_training_again_gives_the_same_bits(name, stage):
    """With torch as it is, in bf16: nothing is added in an order that changes."""
    one, two = (trained(name, "graph", "disjoint", stage == "step 0") for _ in range(2))
    assert not [key for key in one if not torch.equal(one[key], two[key])]


@pytest.mark.parametrize("decoder", ["deeplabv3plus", "deeplabv3"])
@pytest.mark.parametrize("stage", ["step 0", "disjoint"])
def test_training_a_resnet_again_gives_the_same_bits(decoder, stage):
    settings = ["net.encoder=resnet50", "net.weights=none", f"net.decoder={decoder}"]
    one, two = (trained("sdr", "graph", "disjoint", stage == "step 0", *settings) for _ in range(2))
    assert all(torch.isfinite(tensor).all() for tensor in one.values())
    assert not [key for key in one if not torch.equal(one[key], two[key])]


class Waiting(Method):
    """Makes the host wait, which a recording does not allow."""

    name, summary, replayable = "waiting", "", True

    def terms(self, batch, student, teacher):
        terms = super().terms(batch, student, teacher)
        return {"ce": terms["ce"] * (1.0 if terms["ce"].item() > -1 else 2.0)}


def test_what_cannot_be_recorded_is_computed_plainly(monkeypatch, deterministic):
    monkeypatch.setitem(METHODS, "waiting", Waiting)
    config = load_config("shapes", between=method_layers("ft", "default", None))
    results = []
    for speed in ("plain", "graph"):
        torch.manual_seed(0)
        student = build_network(config.net, 5).place_on(GPU).train()
        method = Waiting(config)
        method.begin_step(StepInfo(0, 0, 5, "disjoint"), student, None)
        fabric = make_fabric(config)
        wrapped, optimiser = fabric.setup(student, make_optimiser(student, method, config))
        said: list[str] = []
        plain = Pass(fabric, method, wrapped, None)
        compute = GraphPass(plain, said.append) if speed == "graph" else plain
        for _ in range(6):
            compute.zero_gradients()
            compute(random_batch(5, 0))
            optimiser.step()
        results.append({**student.state_dict(), **method.state_dict()})
        assert bool(said) == (speed == "graph")
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def test_a_recording_does_not_mind_a_thread_that_pins_memory():
    """As that of a loader does, while the first batches are trained on."""
    config = load_config("shapes", between=method_layers("ft", "default", None))
    student = build_network(config.net, 5).place_on(GPU).train()
    method = METHODS["ft"](config)
    method.begin_step(StepInfo(0, 0, 5, "disjoint"), student, None)
    fabric = make_fabric(config)
    said: list[str] = []
    compute = GraphPass(Pass(fabric, method, fabric.setup(student), None), said.append)
    pinned: list[torch.Tensor] = []
    errors: list[Exception] = []
    enough = threading.Event()

    def pin():
        try:
            while not enough.is_set() and len(pinned) < 4000:
                pinned.append(torch.empty(2**20, dtype=torch.uint8).pin_memory())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        for _ in range(6):
            compute.zero_gradients()
            compute(random_batch(5, 0))
    finally:
        enough.set()
        thread.join()
    assert pinned and not errors and not said
    assert compute._graph is not None


def test_the_state_of_the_optimiser_is_restored_exactly(tmp_path):
    config = load_config("shapes")
    results = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        network = build_network(config.net, 5).place_on(GPU).to(memory_format=torch.channels_last)
        optimiser = make_optimiser(network, METHODS["ft"](config), config)
        for number in range(3):
            if interrupted and number == 2:
                save_tensors(tmp_path / "state", optimiser_tensors(optimiser))
                optimiser = make_optimiser(network, METHODS["ft"](config), config)
                load_optimiser(optimiser, load_tensors(tmp_path / "state"))
            for parameter in network.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimiser.step()
        results.append(network.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize(("name", "decoder"), [("sdr", "deeplabv3plus"), ("rw", "deeplabv3")])
def test_a_compiled_pass_is_no_further_from_the_truth_than_the_plain_one(name, decoder, monkeypatch):
    """In bf16: the gradient's distance to that of float32 arithmetic (and not TF32, which is hardly nearer)."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    gradients = {}
    compiled = [(speed, precision) for speed in ("compile", "trunk") for precision in ("bf16", "fp32")]
    for speed, precision in [("plain", "fp32"), ("plain", "bf16"), *compiled]:
        settings = [f"run.speed={speed}", f"run.precision={precision}", f"net.decoder={decoder}"]
        config = load_config(
            "shapes", None, parse_settings(settings), method_layers(name, "default", None), own_sections(name)
        )
        torch.manual_seed(0)
        student = build_network(config.net, 5).place_on(GPU)
        teacher = build_network(config.net, 5).place_on(GPU).eval().requires_grad_(False)
        method = METHODS[name](config)
        method.begin_step(StepInfo(0, 0, 5, "disjoint"), student, None)
        method.end_step(student)
        method.begin_step(StepInfo(1, 5, 2, "disjoint"), student, teacher)
        student.train()
        student.freeze_statistics()
        fabric = make_fabric(config)
        wrapped = fabric.setup(student)
        compute = make_pass(fabric, method, wrapped, teacher if method.needs_teacher else None, config, 0, print)
        torch.manual_seed(1)
        for _ in range(6):
            compute.zero_gradients()
            compute(random_batch(7, 5))
        how = {"compile": "compiled, replayed", "trunk": "compiled trunk, replayed"}
        assert compute.how == (f"{how[speed]} as a CUDA graph" if speed in how else "plain")
        gradients[speed, precision] = torch.cat([p.grad.flatten() for p in student.parameters()])
    truth = gradients["plain", "fp32"]
    far = {key: float((value - truth).norm() / truth.norm()) for key, value in gradients.items()}
    for speed in how:
        assert far[speed, "fp32"] < 1e-4, far
        assert far[speed, "bf16"] < 1.1 * far["plain", "bf16"] + 1e-3, far

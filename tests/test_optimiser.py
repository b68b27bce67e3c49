"""Optimisers and schedules by name, against torch's own and against formulas."""

from __future__ import annotations

import math

import pytest
import torch

from runs import content, run
from sdrseg.config import load_config
from sdrseg.engine.checkpoint import load_optimiser, load_tensors, optimiser_tensors, save_tensors
from sdrseg.engine.optimiser import make_optimiser, set_learning_rates
from sdrseg.errors import UsageError
from sdrseg.methods import METHODS
from sdrseg.network import build_network


def rates(iterations: int = 10, **settings) -> list[float]:
    """The learning rate of the encoder in each iteration."""
    config = load_config("shapes", None, {"optim.lr": 0.5} | {f"optim.{k}": v for k, v in settings.items()})
    optimiser = make_optimiser(build_network(config.net, 3), METHODS["ft"](config), config)
    made = []
    for iteration in range(iterations):
        set_learning_rates(optimiser, config.optim, iteration, iterations)
        made.append(optimiser.param_groups[0]["lr"])
    return made


def test_schedules():
    assert rates() == [0.5 * (1 - i / 10) ** 0.9 for i in range(10)]  # bit for bit
    assert rates(schedule="cosine") == pytest.approx([0.25 * (1 + math.cos(math.pi * i / 10)) for i in range(10)])
    assert rates(schedule="constant") == [0.5] * 10
    assert rates(schedule="constant", warmup=4) == [0.125, 0.25, 0.375] + [0.5] * 7
    warm = rates(warmup=2)
    assert warm[0] == rates()[0] / 2 and warm[1:] == rates()[1:]


@pytest.mark.parametrize(
    ("settings", "kind", "options"),
    [
        ({}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}),
        ({"optim.momentum": 0.0}, torch.optim.SGD, {"weight_decay": 1e-4}),
        ({"optim.nesterov": False, "optim.weight_decay": 0.0}, torch.optim.SGD, {"momentum": 0.9}),
        (
            {"optim.optimiser": "adamw", "optim.betas": (0.8, 0.99)},
            torch.optim.AdamW,
            {"betas": (0.8, 0.99), "weight_decay": 1e-4},
        ),
    ],
)
@pytest.mark.parametrize("interrupted", [False, True])
def test_an_optimiser_is_torchs_own_also_when_it_is_saved_and_restored(tmp_path, settings, kind, options, interrupted):
    config = load_config("shapes", None, {"optim.lr": 0.01, **settings})
    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        network = build_network(config.net, 3)
        optimiser = (
            make_optimiser(network, METHODS["ft"](config), config)
            if ours
            else kind(network.parameters(), lr=0.01, **options)
        )
        for number in range(4):
            if ours and interrupted and number == 2:
                save_tensors(tmp_path / "state", optimiser_tensors(optimiser))
                optimiser = make_optimiser(network, METHODS["ft"](config), config)
                load_optimiser(optimiser, load_tensors(tmp_path / "state"))
            for parameter in network.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimiser.step()
        results.append(network.state_dict())
    assert all(torch.equal(mine, results[1][name]) for name, mine in results[0].items())


def test_a_frozen_encoder_gets_no_gradient_and_stays_bit_for_bit():
    config = load_config("shapes", None, {"optim.encoder_lr_factor": 0.0})
    network = build_network(config.net, 3)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    optimiser = make_optimiser(network, METHODS["ft"](config), config)
    network.freeze_statistics()
    network(torch.randn(2, 3, 32, 32)).logits.square().mean().backward()
    optimiser.step()
    encoder = list(network.encoder_parameters())
    assert all(p.grad is None for p in encoder) and all(p.grad is not None for p in network.decoder_parameters())
    stayed = {name for name, tensor in network.state_dict().items() if torch.equal(tensor, before[name])}
    assert {name for name in before if name.startswith("encoder.")} <= stayed < before.keys()


def test_settings_of_the_optimiser_reach_a_run(tmp_path):
    adamw = ("optim.optimiser=adamw", "optim.schedule=cosine", "optim.warmup=3", "optim.lr=1e-3", "optim.momentum=0")
    run(tmp_path / "adamw", "ft", *adamw)
    run(tmp_path / "sgd", "ft", "optim.lr=1e-3", "optim.momentum=0", bases=tmp_path / "others")
    assert content(tmp_path / "adamw") != content(tmp_path / "sgd")


@pytest.mark.parametrize("setting", ["train.batch_size=1", "run.accumulate=4"])
def test_a_batch_norm_of_one_value_is_refused_before_the_folder_is_made(tmp_path, setting):
    with pytest.raises(UsageError, match=r"One image at a time is too few.*net.bn=freeze_stats"):
        run(tmp_path / "run", "sdr", setting)
    assert not (tmp_path / "run").exists()


def test_the_batch_norm_of_later_steps_is_refused_too_where_step_0_is_stored(tmp_path):
    frozen = ("run.accumulate=4", "net.bn=freeze_stats")
    run(tmp_path / "first", "ft", *frozen)
    with pytest.raises(UsageError, match="One image at a time is too few"):
        run(tmp_path / "second", "mib", *frozen, "net.bn_later=train")
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("other", ["net.bn=freeze_stats", "net.decoder=unet"])
def test_one_image_at_a_time_is_enough_where_there_is_no_such_batch_norm(tmp_path, other):
    few = ("shapes.train=40", "shapes.size=64", "data.crop=64", "net.output_stride=32") if "unet" in other else ()
    run(tmp_path / "run", "ft", "run.accumulate=4", *few, other)
    assert (tmp_path / "run/summary.json").exists()

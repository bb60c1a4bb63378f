"""SGD and averages on flat tensors against torch.optim.SGD and ModelEMA, with and without a loss scaler."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from tests.engine.test_trainer import new_trainer
from utils.engine.ema import ModelEMA, new_half_copy
from utils.fast.flat_optimizer import ALIGNED, FlatAverage, FlatSGD, KeptHalfCopy, flatten, starts_of, trained
from utils.fast.train_step import FastSteps


def new_model():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Conv2d(6, 5, 1)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def new_optimizer(model):
    """Three groups as in training: without decay, with decay, and one without parameters."""
    norm = list(model[1].parameters())
    groups = [{"params": norm}, {"params": [p for p in model.parameters() if p.dim() == 4], "weight_decay": 0.1},
              {"params": [model[2].bias]}, {"params": []}]  # fmt: skip
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


def images(seed):
    return torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def backward(model, scaler, seed, factor=1.0):
    scaler.scale(model(images(seed)).square().sum() * factor).backward()


def flat_sgd(optimizer, scaler):
    """A FlatSGD, after the first backward pass."""
    groups = trained(optimizer)
    return FlatSGD(optimizer, scaler, groups, flatten([p for group in groups for p in group], "cpu"))


def train(schedule, factors, scale=None, passes=1, state=None):
    """(model, optimizer, scaler) after torch's steps and after ours; `schedule` gives (rate, momentum) of each."""
    results = []
    for ours in (False, True):
        model = new_model()
        optimizer, scaler = (
            new_optimizer(model),
            torch.amp.GradScaler("cpu", init_scale=scale or 1, enabled=bool(scale)),
        )
        if state:
            optimizer.load_state_dict(deepcopy(state))
        sgd = None
        for seed, ((rate, momentum), factor) in enumerate(zip(schedule, factors, strict=True)):
            for group in optimizer.param_groups:
                group["lr"], group["momentum"] = rate, momentum
            for k in range(passes):
                backward(model, scaler, passes * seed + k, factor)
                if ours:
                    sgd = sgd or flat_sgd(optimizer, scaler)
                    sgd.collect()
            if ours:
                sgd.step(torch.tensor([rate] * 4 + [momentum]))
                assert all(p.grad is None for p in model.parameters())
            else:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        results.append((model, optimizer, scaler))
    return results


def assert_same(reference, ours, rtol=1e-5):
    for found, expected in zip(ours[0].state_dict().values(), reference[0].state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)
    found, expected = ours[1].state_dict(), reference[1].state_dict()
    assert found["param_groups"] == expected["param_groups"] and found["state"].keys() == expected["state"].keys()
    for key, entry in expected["state"].items():
        torch.testing.assert_close(found["state"][key], entry, rtol=rtol, atol=1e-6)
    assert ours[2].state_dict() == reference[2].state_dict()


WARM_UP = [(0.0, 0.8), (0.02, 0.85), (0.05, 0.9), (0.05, 0.937), (0.04, 0.937)]


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_equals_torch(scale, passes):
    assert_same(*train(WARM_UP, [1e-2] * 5, scale, passes))


@pytest.mark.parametrize("bad", [(0,), (0, 1), (2,), (4,), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_step_that_overflows_changes_nothing_but_the_scale(bad, value):
    """Also the first one, after which fused kernels were seen to read momentum that nobody wrote."""
    factors = [value if i in bad else 1e-2 for i in range(5)]
    reference, ours = train(WARM_UP, factors, scale=1024.0)
    for model, optimizer, _ in (reference, ours):  # of torch's optimiser such a step has no state at all
        for parameter in model.parameters():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
    assert_same(reference, ours)
    assert ours[2].get_scale() == 1024 / 2 ** len(bad)


def test_step_by_hand():
    """w = 2, g = 1 + 0.1 w = 1.2, m = 0.5 * 4 + 1.2 = 3.2, w -= 0.1 * (1.2 + 0.5 * 3.2)."""
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5, weight_decay=0.1, nesterov=True)
    optimizer.state[weight]["momentum_buffer"] = torch.tensor([4.0])
    weight.sum().backward()
    sgd = flat_sgd(optimizer, torch.amp.GradScaler("cpu", enabled=False))
    sgd.collect()
    sgd.step(torch.tensor([0.1, 0.5]))
    assert weight.item() == pytest.approx(2 - 0.1 * 2.8)
    assert optimizer.state[weight]["momentum_buffer"].item() == pytest.approx(3.2)


def test_momentum_of_a_checkpoint_is_taken_over_and_given_back():
    _, (_, optimizer, _) = train(WARM_UP, [1e-2] * 5)
    reference, ours = train(WARM_UP, [1e-2] * 5, state=optimizer.state_dict())
    assert_same(reference, ours)
    torch_again, _ = train(WARM_UP, [1e-2] * 5, state=ours[1].state_dict())
    assert torch_again[1].state_dict()["state"].keys() == ours[1].state_dict()["state"].keys()


def after_backward(model):
    """(optimizer, scaler, flat optimizer) with the gradients of one pass collected."""
    optimizer, scaler = new_optimizer(model), torch.amp.GradScaler("cpu", enabled=False)
    backward(model, scaler, 0)
    sgd = flat_sgd(optimizer, scaler)
    sgd.collect()
    return optimizer, scaler, sgd


def test_dropped_gradients_do_not_count():
    model = new_model()
    _, scaler, sgd = after_backward(model)
    expected = sgd.gradient.clone()
    assert expected.abs().sum() > 0
    sgd.drop()
    assert sgd.gradient.abs().sum() == 0
    backward(model, scaler, 0)
    sgd.collect()
    torch.testing.assert_close(sgd.gradient, expected)


def test_parameters_without_gradient_are_left_alone():
    model = new_model()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    optimizer, _, sgd = after_backward(model)
    sgd.step(torch.tensor([0.1, 0.1, 0.1, 0.1, 0.9]))
    assert torch.equal(model[0].weight, before), "no decay either"
    assert model[0].weight not in optimizer.state and len(optimizer.state) == 4


def test_tensors_keep_their_strides_and_start_aligned():
    optimizer, _, sgd = after_backward(new_model())
    for part in sgd.parts:
        for parameter, gradient in zip(part.parameters, part.gradients, strict=True):
            assert gradient.stride() == parameter.stride() and gradient.storage_offset() % ALIGNED == 0
            assert optimizer.state[parameter]["momentum_buffer"].stride() == parameter.stride()


# ---- flat tensors and averages --------------------------------------------------------------------------------------


def test_flat_tensors_keep_objects_values_shapes_and_strides():
    tensors = [
        torch.rand(3),
        torch.rand(2, 4, 3, 3).to(memory_format=torch.channels_last),
        torch.rand(()),
        torch.rand(70),
    ]
    before = [(tensor.clone(), tensor.stride()) for tensor in tensors]
    flat = flatten(tensors, "cpu")
    assert starts_of(tensors) == [0, 64, 192, 256, 384] and len(flat) == 384
    for tensor, (values, strides) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, values) and tensor.stride() == strides
    assert flat[3:64].abs().sum() == 0
    assert [tensor.data_ptr() - flat.data_ptr() for tensor in tensors] == [0, 4 * 64, 4 * 192, 4 * 256]
    flat.mul_(2)
    assert torch.equal(tensors[1], before[1][0] * 2)
    assert flatten([], "cpu").shape == (0,)


def test_average_follows_the_reference():
    """Six updates of parameters (a frozen one among them) and of BatchNorm statistics; whole numbers stay."""
    model = new_model()
    model[2].weight.requires_grad_(False)
    reference, ours = ModelEMA(model), ModelEMA(model)
    average = FlatAverage(model, ours.ema, first=list(model[1].parameters()))
    for step in range(1, 7):
        with torch.no_grad():
            for value in model.state_dict().values():
                value.add_(torch.randn(value.shape) if value.is_floating_point() else 1)
        reference.update(model)
        average.move(torch.tensor(1 - ours.decay(step)))
    for name, value in reference.ema.state_dict().items():
        torch.testing.assert_close(ours.ema.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    assert ours.ema[1].num_batches_tracked == 0 and average.is_valid()
    assert torch.equal(average.weights[:6], model[1].weight), "the parameters of `first` come first"


def test_buffers_outside_of_the_state_are_not_averaged():
    model = new_model()
    model.register_buffer("temporary", torch.ones(1), persistent=False)
    ema = ModelEMA(model)
    average = FlatAverage(model, ema.ema)
    model.temporary += 1
    average.move(torch.tensor(0.5))
    assert ema.ema.temporary == 1


def test_other_tensors_in_the_model_are_noticed():
    for change in (
        lambda model: model.half().float(),
        lambda model: model[1].register_buffer("running_mean", torch.zeros(6)),
    ):
        model = new_model()
        average = FlatAverage(model, ModelEMA(model).ema)
        assert average.is_valid()
        change(model)
        assert not average.is_valid()


def test_the_half_copy_that_is_kept_follows_the_average():
    ema, kept = ModelEMA(new_model()), KeptHalfCopy()
    ema.half_copy = kept
    first = ema.ema_for_evaluation(half=True)
    for ours, value in zip(first.state_dict().values(), new_half_copy(ema.ema).state_dict().values(), strict=True):
        assert torch.equal(ours, value) and (ours.dtype, ours.stride()) == (value.dtype, value.stride())
    first.to(memory_format=torch.contiguous_format)  # whoever evaluates may want another order
    for seed in range(3):
        model = new_model()
        model[0].weight.data.add_(seed + 1 / 3)
        model(images(seed))  # moves running statistics, and counts
        ema.ema.load_state_dict(model.state_dict())
        ema.ema.names = [str(seed)]
        average = deepcopy(ema.ema.state_dict())
        copy, new = ema.ema_for_evaluation(half=True), new_half_copy(ema.ema)
        assert copy is first and copy.names == [str(seed)] and not copy.training
        for (name, ours), value in zip(copy.state_dict().items(), new.state_dict().values(), strict=True):
            assert ours.dtype == value.dtype and torch.equal(ours, value), name
        assert all(torch.equal(average[name], value) for name, value in ema.ema.state_dict().items())
    ema.ema = deepcopy(ema.ema)  # another model: another copy
    assert ema.ema_for_evaluation(half=True) is not first
    assert ema.ema_for_evaluation(half=False) is ema.ema


def test_fast_steps_copy_the_average_once_for_all_validations():
    trainer = new_trainer()
    plain = trainer.ema.ema_for_evaluation(half=True)
    assert trainer.ema.ema_for_evaluation(half=True) is not plain
    FastSteps(trainer)
    assert trainer.ema.ema_for_evaluation(half=True) is trainer.ema.ema_for_evaluation(half=True)

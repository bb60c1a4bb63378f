"""The state of a training run: its steps by hand, what is frozen, and how it is taken up again."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.tiny_model import tiny_model
from utils.engine.batches import Batch
from utils.engine.checkpoint import save
from utils.engine.checkpoint_reader import read_checkpoint
from utils.engine.ema import ModelEMA
from utils.engine.optimizer import build_optimizer, lr_factor
from utils.engine.trainer import Trainer, freeze_layers, precision_of
from utils.fast.train_step import FastSteps

HYP = {"warmup_bias_lr": 0.1, "warmup_momentum": 0.8, "momentum": 0.9}
LR0 = 0.01


def batch(seed=0):
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
    return Batch(images, torch.zeros(0, 6), ("a.png", "b.png"))


def squares(maps, targets, images):
    """A loss without targets; its items are told apart by their values."""
    loss = sum(level.square().mean() for level in maps)
    return loss, torch.tensor([1.0, 2.0, 3.0, loss.item()])


def new_trainer(total_batch=16, epochs=10, adam=False, nc=2, seed=0, loss_factor=1.0, first_epoch=0, num_warmup=100):
    torch.manual_seed(seed)
    model = tiny_model(nc)
    optimizer = build_optimizer(model, LR0, HYP["momentum"], 0.0005, adam)
    scheduler = LambdaLR(optimizer, lr_factor(epochs, 0.1))
    trainer = Trainer(model, HYP, total_batch, optimizer, scheduler, ModelEMA(model))
    trainer.start(model, squares, loss_factor, first_epoch, num_warmup)
    return trainer


def run(trainer, updates):
    trainer.begin_epoch()
    for seed in range(updates):
        trainer.forward_backward(batch(seed))
        trainer.update()
    return trainer


def gradients(trainer):
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


# ---- one step -------------------------------------------------------------------------------------------------------


class Doubled(torch.nn.Module):
    """Another form of a model, over the same tensors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return [2 * level for level in self.model(images)]


@pytest.mark.parametrize("make_steps", [lambda trainer: trainer, FastSteps])
def test_the_forward_pass_calls_the_network(make_steps):
    trainer = new_trainer()
    expected = trainer.step(0, 0, batch(0))[3]
    trainer = new_trainer()
    steps = make_steps(trainer)
    network = Doubled(trainer.model).eval()
    trainer.start(trainer.model, squares, 1.0, 0, 100, network)
    steps.begin_epoch()
    items = torch.cat((steps.step(0, 0, batch(0)).view(-1, 4), steps.late_items()))
    assert network.training and items[0, 3] == pytest.approx(4 * expected.item(), rel=1e-5)
    assert list(trainer.checkpoint(0, 0.0, "")["model"].state_dict()) == list(trainer.model.state_dict())


@pytest.mark.parametrize(("total_batch", "accumulate"), [(1, 64), (16, 4), (20, 3), (64, 1), (384, 1)])
def test_accumulation_starts_with_the_nominal_batch(total_batch, accumulate):
    assert new_trainer(total_batch).accumulate == accumulate


def test_warm_up_by_hand():
    trainer = new_trainer(total_batch=16)
    trainer.warm_up(50, epoch=0)
    assert trainer.accumulate == 2  # 1 + 0.5 * (4 - 1) = 2.5, rounded to the even number
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([0.005, 0.005, 0.055])
    assert [group["momentum"] for group in trainer.optimizer.param_groups] == pytest.approx([0.85] * 3)

    trainer.warm_up(100, epoch=5)  # half way down the cosine from 1 to 0.1
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert rates == pytest.approx([LR0 * 0.55] * 3) and trainer.accumulate == 4
    trainer.accumulate = 3
    trainer.warm_up(101, epoch=9)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == rates and trainer.accumulate == 3


def test_gradients_add_up_and_are_not_averaged():
    trainer = new_trainer(loss_factor=1.0)
    trainer.begin_epoch()
    items = trainer.forward_backward(batch(0))
    assert items[:3].tolist() == [1, 2, 3] and items[3] > 0
    first = gradients(trainer)
    trainer.forward_backward(batch(0))
    twice = gradients(trainer)
    for name, gradient in first.items():
        assert torch.allclose(twice[name], 2 * gradient, rtol=1e-4, atol=1e-6), name

    scaled = new_trainer(loss_factor=4.0)
    scaled.begin_epoch()
    scaled.forward_backward(batch(0))
    for name, gradient in gradients(scaled).items():
        assert torch.allclose(gradient, 4 * first[name], rtol=1e-4, atol=1e-6), name


def test_update_moves_weights_and_average_and_clears_gradients():
    trainer = new_trainer()
    before = deepcopy(trainer.model.state_dict())
    run(trainer, 1)
    weight = "model.0.conv.weight"
    assert not torch.equal(trainer.model.state_dict()[weight], before[weight])
    assert trainer.ema.updates == 1 and not gradients(trainer)
    decay = trainer.ema.decay(1)
    expected = before[weight] * decay + trainer.model.state_dict()[weight] * (1 - decay)
    assert torch.allclose(trainer.ema.ema.state_dict()[weight], expected)


def test_epoch_drops_left_over_gradients():
    trainer = new_trainer()
    trainer.forward_backward(batch())
    trainer.model.eval()
    assert gradients(trainer)
    trainer.begin_epoch()
    assert not gradients(trainer) and trainer.model.training


def test_schedule_is_one_epoch_late():
    trainer = new_trainer(epochs=10)
    factor = lr_factor(10, 0.1)
    run(trainer, 1)
    assert trainer.end_epoch() == [LR0] * 3
    rates = [trainer.end_epoch()[0] for _ in range(3)]
    assert rates == pytest.approx([LR0 * factor(0), LR0 * factor(1), LR0 * factor(2)])


def test_step_updates_every_so_many_batches():
    trainer = new_trainer(total_batch=32, num_warmup=0)
    trainer.begin_epoch()
    updates = []
    for i in range(1, 6):  # iteration 0 would be warm-up
        trainer.step(i, 0, batch(i))
        updates.append(trainer.ema.updates)
    assert trainer.accumulate == 2 and updates == [0, 1, 1, 2, 2]
    assert trainer.late_items().shape == (0, 4)


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [(None, "cuda", torch.float16), (None, "cpu", None), ("fp16", "cuda", torch.float16), ("off", "cuda", None),
     ("bf16", "cuda", torch.bfloat16), ("bf16", "cpu", torch.bfloat16), ("off", "cpu", None)],
)  # fmt: skip
def test_precision(name, device, expected, caplog):
    assert precision_of(name, device) is expected and not caplog.records


def test_half_precision_is_for_gpus(caplog):
    assert precision_of("fp16", "cpu") is None and "--amp fp16 is for GPUs" in caplog.text


# ---- freezing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "frozen"), [([0], set()), ([2], {0, 1}), ([0, 1, 3], {0, 1, 3}), ([5], {0, 1, 2, 3, 4}), ([1, 1], {1})]
)
def test_freeze(layers, frozen):
    model = tiny_model()
    model.model[2].requires_grad_(False)  # what was frozen before is released
    freeze_layers(model, layers)
    still = {i for i, layer in enumerate(model.model) if not any(p.requires_grad for p in layer.parameters())}
    trained = {i for i, layer in enumerate(model.model) if all(p.requires_grad for p in layer.parameters())}
    assert still == frozen and trained == set(range(6)) - frozen


def test_frozen_layers_keep_weights_but_not_statistics():
    trainer = new_trainer()
    freeze_layers(trainer.model, [1])
    before = deepcopy(trainer.model.state_dict())
    run(trainer, 2)
    after = trainer.model.state_dict()
    assert torch.equal(after["model.0.conv.weight"], before["model.0.conv.weight"])
    assert torch.equal(after["model.0.bn.weight"], before["model.0.bn.weight"])
    assert not torch.equal(after["model.0.bn.running_mean"], before["model.0.bn.running_mean"])
    assert not torch.equal(after["model.1.conv.weight"], before["model.1.conv.weight"])


def test_freezing_everything_is_refused():
    with pytest.raises(ValueError, match="--freeze 6 leaves no layer"):
        freeze_layers(tiny_model(), [6])


# ---- taking up a run ------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    """The checkpoint of a run after epoch 4, through a file."""
    trainer = run(new_trainer(epochs=10), 3)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.00777
    save(trainer.checkpoint(4, 0.5, "results\n"), tmp_path / "last.pt")
    return read_checkpoint(tmp_path / "last.pt")


def test_checkpoint_content():
    trainer = run(new_trainer(), 2)
    content = trainer.checkpoint(3, 0.125, "a line\n")
    assert (content["epoch"], content["best_fitness"], content["training_results"]) == (3, 0.125, "a line\n")
    assert content["updates"] == 2 and content["scaler"] == trainer.scaler.state_dict()
    for name, value in trainer.ema.ema.state_dict().items():
        assert torch.equal(content["ema"].state_dict()[name], value.half() if value.is_floating_point() else value)
    assert content["optimizer"]["param_groups"][0]["initial_lr"] == LR0
    momentum = content["optimizer"]["state"][0]["momentum_buffer"]
    assert momentum.dtype == torch.float32 and momentum.abs().sum() > 0


def test_restore(stored):
    trainer = new_trainer(seed=1)
    progress = trainer.restore(stored, epochs=10, nc=2)
    assert (progress.start_epoch, progress.epochs, progress.best_fitness) == (5, 10, 0.5)
    assert progress.results_text == "results\n" and progress.results == (0.0,) * 7
    assert np.array_equal(progress.maps, [0, 0])
    assert trainer.ema.updates == 3
    for name, value in trainer.ema.ema.state_dict().items():
        assert value.dtype != torch.float16 and torch.equal(value, stored.ema.state[name].to(value.dtype))
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.00777] * 3
    assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [LR0] * 3
    own = trainer.optimizer.state_dict()["state"]
    assert set(own) == set(stored.optimizer["state"]) and len(own) > 10
    for key, value in stored.optimizer["state"].items():
        assert torch.equal(own[key]["momentum_buffer"], value["momentum_buffer"])


def test_restored_run_continues_the_schedule(stored):
    trainer = new_trainer(epochs=10)
    progress = trainer.restore(stored, epochs=10, nc=2)
    trainer.start(trainer.model, squares, 1.0, progress.start_epoch, num_warmup=0)
    run(trainer, 1)
    assert trainer.end_epoch() == [0.00777] * 3, "the rate in force is that of the checkpoint"
    assert trainer.end_epoch()[0] == pytest.approx(LR0 * lr_factor(10, 0.1)(5))


def test_nothing_to_restore(stored):
    def untouched(checkpoint, nc=2):
        trainer = new_trainer(seed=1, nc=nc)
        before = deepcopy(trainer.ema.ema.state_dict())
        progress = trainer.restore(checkpoint, epochs=10, nc=nc)
        assert all(torch.equal(value, before[name]) for name, value in trainer.ema.ema.state_dict().items())
        assert trainer.ema.updates == 0 and not trainer.optimizer.state
        assert (progress.start_epoch, progress.epochs, progress.best_fitness, len(progress.maps)) == (0, 10, 0.0, nc)

    untouched(None)
    untouched(stored, nc=3)
    stored.epoch = None
    untouched(stored)
    stored.epoch, stored.optimizer = -1, None  # stripped
    untouched(stored)


def test_restore_from_a_file_with_gaps(stored):
    stored.best_fitness = stored.training_results = stored.updates = stored.scaler = None
    trainer = new_trainer()
    progress = trainer.restore(stored, epochs=10, nc=2)
    assert (progress.start_epoch, progress.best_fitness, progress.results_text) == (5, 0.0, "")
    assert trainer.ema.updates == 0
    stored.ema = None
    assert new_trainer().restore(stored, epochs=10, nc=2).start_epoch == 5


def test_more_epochs_than_asked_for(stored):
    assert new_trainer().restore(stored, epochs=6, nc=2).epochs == 6
    assert new_trainer().restore(stored, epochs=3, nc=2).epochs == 7  # 3 + epoch 4
    for epochs in (5, 1):
        with pytest.raises(ValueError, match="last.pt has had 5 epochs, so --epochs .* leaves nothing to train"):
            new_trainer().restore(stored, epochs=epochs, nc=2)


DAMAGES = (
    lambda optimizer: optimizer["state"][0].update(momentum_buffer=torch.ones(3)),
    lambda optimizer: optimizer["state"][0].update(momentum_buffer="x"),
    lambda optimizer: optimizer["param_groups"][0].update(dampening="x"),
    lambda optimizer: optimizer["param_groups"][0].update(momentum=torch.ones(3)),
    lambda optimizer: optimizer["param_groups"][1].pop("weight_decay"),
    lambda optimizer: optimizer["param_groups"].__setitem__(0, torch.ones(3)),
    lambda optimizer: optimizer["param_groups"][0]["params"].__setitem__(0, torch.ones(3)),
    lambda optimizer: optimizer["param_groups"][0]["params"].__setitem__(0, [[]]),
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_state_of_the_optimizer_is_refused(damage, stored):
    damage(stored.optimizer)
    with pytest.raises(ValueError, match="last.pt holds the state of another optimizer"):
        new_trainer().restore(stored, epochs=10, nc=2)


@pytest.mark.parametrize("damage", [{"scale": "x"}, {"growth_factor": None}, {"scale": torch.ones(2)}, None], ids=str)
def test_damaged_state_of_the_loss_scaler_is_refused(damage, stored):
    trainer = new_trainer()
    trainer.scaler = torch.amp.GradScaler("cpu")
    stored.scaler = trainer.scaler.state_dict() | damage if damage else {"scale": 1.0}
    with pytest.raises(ValueError, match="last.pt holds the state of another optimizer"):
        trainer.restore(stored, epochs=10, nc=2)


def test_state_of_another_optimizer_is_refused(stored):
    with pytest.raises(ValueError, match="last.pt holds the state of another optimizer.*--adam"):
        new_trainer(adam=True).restore(stored, epochs=10, nc=2)
    for damaged in ({}, {"param_groups": []}, {"param_groups": 5}, {"param_groups": stored.optimizer["param_groups"]}):
        stored.optimizer = damaged
        with pytest.raises(ValueError, match="last.pt holds the state of another optimizer"):
            new_trainer().restore(stored, epochs=10, nc=2)

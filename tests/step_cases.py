"""Small training runs of equal batches, made by the reference or by a fast step, and their comparison."""

from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.tiny_model import tiny_model
from utils.engine.batches import Batch
from utils.engine.ema import ModelEMA
from utils.engine.optimizer import build_optimizer, lr_factor
from utils.engine.trainer import Trainer
from utils.loss import batched as batched_losses
from utils.loss import criterion

HYP = {"warmup_bias_lr": 0.1, "warmup_momentum": 0.8, "momentum": 0.937, "box": 0.05, "obj": 0.7, "cls": 0.3,
       "cls_pw": 1.0, "obj_pw": 1.0, "anchor_t": 4.0, "fl_gamma": 0.0}  # fmt: skip
NUM_CLASSES, SIZE, BATCH = 3, 64, 4


def batches(count, device="cpu", as_bytes=True, sizes=(BATCH,)):
    """`count` random batches [sizes in turn] of 64 px: bytes and targets on the host, or as the reference has them."""
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        batch = sizes[i % len(sizes)]
        images = torch.randint(256, (batch, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator).to(device)
        num = int(torch.randint(1, 5 * batch, (), generator=generator))
        image = torch.randint(batch, (num, 1), generator=generator)
        classes = torch.randint(NUM_CLASSES, (num, 1), generator=generator)
        sides = torch.rand(num, 2, generator=generator) * 0.4 + 0.05
        centres = sides / 2 + torch.rand(num, 2, generator=generator) * (1 - sides)
        targets = torch.cat((image, classes, centres, sides), 1)
        paths = tuple(f"{i}_{k}.jpg" for k in range(batch))
        if as_bytes:
            yield Batch(images, targets, paths)
        else:
            yield Batch(images.float() / 255, targets.to(device), paths)


def new_trainer(device="cpu", precision=None, total_batch=16, num_warmup=12, adam=False, batched=False, use_ota=True):
    """A Trainer of the tiny model with its loss, the reference's or a batched one."""
    torch.manual_seed(1)
    model = tiny_model(NUM_CLASSES).to(device)
    model.hyp, model.gr, model.nc = HYP, 1.0, NUM_CLASSES
    optimizer = build_optimizer(model, 0.01, HYP["momentum"], 0.0005, adam)
    trainer = Trainer(model, HYP, total_batch, optimizer, LambdaLR(optimizer, lr_factor(10, 0.1)), ModelEMA(model),
                        precision)  # fmt: skip
    classes = batched_losses.CLASSES if batched else criterion.REFERENCE
    compute_loss, _ = criterion.build_losses(model, classes=classes, use_ota=use_ota)
    trainer.start(model, compute_loss, 1.0, 0, num_warmup)
    return trainer


@dataclass
class StepsRun:
    """What a run of some steps left behind."""

    items: torch.Tensor  # [steps x 4]
    trainer: Trainer

    def state(self):
        """Weights, statistics, averages and momentum, by name."""
        state = {f"model {name}": value for name, value in self.trainer.model.state_dict().items()}
        state |= {f"ema {name}": value for name, value in self.trainer.ema.ema.state_dict().items()}
        for number, entry in self.trainer.optimizer.state_dict()["state"].items():
            state |= {f"optimizer {number} {key}": value for key, value in entry.items() if torch.is_tensor(value)}
        return state


def run(steps, given, epochs=1):
    """Train on the batches `given`, divided into `epochs`; `steps` is a Trainer or what makes its steps."""
    given, items = list(given), []
    per_epoch = len(given) // epochs
    for epoch in range(epochs):
        steps.begin_epoch()
        for i in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            items.append(steps.step(i, epoch, given[i]).view(-1, 4).cpu().clone())
        items.append(steps.late_items())
        steps.end_epoch()
    return StepsRun(torch.cat(items), getattr(steps, "trainer", steps))


def assert_equal_runs(found, expected, rtol, atol):
    """Items and all state of two StepsRuns are close, whole numbers equal."""
    torch.testing.assert_close(found.items, expected.items, rtol=rtol, atol=atol)
    mine, theirs = found.state(), expected.state()
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        is_float = value.is_floating_point()
        torch.testing.assert_close(
            mine[name].cpu(),
            value.cpu(),
            rtol=rtol if is_float else 0,
            atol=atol if is_float else 0,
            msg=lambda text, n=name: f"{n}: {text}",
        )
    assert found.trainer.ema.updates == expected.trainer.ema.updates
    rates = [[group["lr"] for group in r.trainer.optimizer.param_groups] for r in (found, expected)]
    assert rates[0] == rates[1] and found.trainer.accumulate == expected.trainer.accumulate

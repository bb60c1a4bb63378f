"""Replay of the golden training traces: whole runs of train.train over stored batches, recorded step by step."""

import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import train
from tests import parity, small_run
from utils.config.data_yaml import load_data_yaml
from utils.config.hyp import load_hyp
from utils.config.options import train_parser
from utils.loss import assigner
from utils.run.context import Run
from utils.run.folder import open_run_folder, prepare_train_options
from utils.system.distributed import Ranks


def load_trace(name):
    """The recorded values of a stock run."""
    return json.loads((parity.GOLDEN / "train" / f"trace_{name}.json").read_text())


def fill_by_formula(model):
    """The initial weights of the traces named formula: pseudo-random numbers seeded by each entry's name."""
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or "anchor" in name:
            continue
        z = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(tensor.shape))
        if "implicit" in name:
            value = 0.02 * z + (1 if ".im." in name else 0)
        elif z.ndim == 4:
            value = z * np.sqrt(2 / np.prod(z.shape[1:]))
        elif "running_var" in name:
            value = 1 + 0.1 * np.abs(z)
        elif "running_mean" in name:
            value = 0.05 * z
        elif name.endswith("weight"):
            value = 1 + 0.1 * z
        else:
            value = 0.1 * z
            if value.size == 24:  # the bias of a detection convolution: 3 anchors of 5 + 3 channels
                value.reshape(3, 8)[:, 4] -= 4
        tensor.copy_(torch.from_numpy(value.astype(np.float32)))


class StoredBatches(list):
    """The training loader of the traces: two stored batches [images, targets, paths, shapes] in each of two epochs."""

    def __init__(self):
        stored = np.load(parity.GOLDEN / "train" / "trace_batches_64px.npz")

        def batch(i):
            images, targets = (torch.from_numpy(stored[f"train_{kind}_{i}"]) for kind in ("img", "tgt"))
            return images, targets, tuple(f"im{k:02d}.png" for k in range(len(images))), None

        super().__init__(batch(i) for i in range(2))
        self.epochs = iter([self[:], [batch(2), batch(3)]])

    def __iter__(self):
        return iter(next(self.epochs))


def select_by_topk(cost, k):
    """`assigner.select_cheapest` with stock's choice among equal costs on a CPU: whatever topk returns for the row."""
    selected = torch.zeros(cost.shape, dtype=torch.bool)
    for row, number, costs in zip(selected, k.tolist(), cost, strict=True):
        row[costs.topk(number, largest=False).indices] = True
    return selected


def replay(trace, folder, seeded):
    """Run train.train as the trace did; returns what it recorded under the same keys."""
    dataset = folder / "dataset"
    shutil.copytree(parity.GOLDEN / "train" / "dataset_64px", dataset)
    hyp, data = folder / "hyp.yaml", folder / "data.yaml"
    hyp.write_text("\n".join(f"{key}: {value}" for key, value in trace["hyp_file"].items()))
    data.write_text(f"train: {dataset}/images\nval: {dataset}/images\nnc: 3\nnames: [red, green, blue]\n")
    args = ["--weights", "", "--cfg", "cfg/training/yolov7-tiny.yaml", "--data", str(data), "--hyp", str(hyp),
            "--epochs", "2", "--batch-size", "4", "--img-size", "64", "64", "--device", "cpu", "--workers", "0",
            "--noautoanchor", "--project", str(folder / "runs"), "--name", "run"]  # fmt: skip
    with small_run.drawing(pictures=False):
        return run(prepare_train_options(train_parser().parse_args(args), Ranks()), seeded)


def run(opt, seeded):
    record = {"it": [], "steps": [], "results": []}

    class RecordedTrainer(train.Trainer):
        def forward_backward(self, batch):
            items = super().forward_backward(batch)
            record["it"].append({
                "items": items.tolist(),
                "lr": [group["lr"] for group in self.optimizer.param_groups],
                "momentum": [group["momentum"] for group in self.optimizer.param_groups],
            })  # fmt: skip
            return items

        def update(self):
            super().update()
            parameters = [p.detach().double() for p in self.model.parameters()]
            record["steps"].append({
                "after_iteration": len(record["it"]) - 1,
                "param_sum": sum(float(p.sum()) for p in parameters),
                "param_abssum": sum(float(p.abs().sum()) for p in parameters),
            })  # fmt: skip
            record["trainer"] = self

    def build_model(*args):
        model, stored = original_build(*args)
        if not seeded:
            fill_by_formula(model)
        record["init"] = sums(model)
        return model, stored

    def finish_epoch(*args):
        original_finish(*args)
        progress = args[4]
        record["results"].append({"results": list(progress.results), "maps": progress.maps.tolist()})

    def open_loaders(*args):
        return replace(original_open(*args), train=StoredBatches())

    original_build, original_finish, original_open = train.build_model, train.finish_epoch, train.open_loaders
    with (
        mock.patch.object(train, "open_loaders", open_loaders),
        mock.patch.object(assigner, "select_cheapest", select_by_topk),
        mock.patch.object(train, "Trainer", RecordedTrainer),
        mock.patch.object(train, "build_model", build_model),
        mock.patch.object(train, "finish_epoch", finish_epoch),
    ):
        open_run_folder(opt, Ranks())
        train.train(Run(opt, load_hyp(opt.hyp), load_data_yaml(opt.data), torch.device("cpu"), Ranks()))
    trainer = record.pop("trainer")
    record |= {
        "final_model": sums(trainer.model),
        "final_ema": sums(trainer.ema.ema),
        "ema_updates": trainer.ema.updates,
    }
    record["folder"] = Path(opt.save_dir)
    return record


def sums(model):
    """[sum, sum of absolutes, shape] of every state entry, in double precision."""
    return {
        name: [float(t.double().sum()), float(t.double().abs().sum()), list(t.shape)]
        for name, t in model.state_dict().items()
    }

"""Processes, devices and seeds, without a GPU: the CUDA calls are replaced where a device is chosen."""

import logging
import os
import random
import socket
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from utils.system import distributed, rendezvous
from utils.system.distributed import (
    Ranks,
    check_device,
    first_on_each_machine,
    init_seeds,
    read_ranks,
    select_device,
    unwrap,
)  # fmt: skip

CPU = torch.device("cpu")


# ---- ranks ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def set_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


def test_single_process(environment):
    ranks = read_ranks()
    assert ranks == Ranks(-1, -1, 1) and ranks.is_main and not ranks.is_distributed


def test_torchrun(environment):
    environment(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1)
    ranks = read_ranks()
    assert ranks == Ranks(5, 1, 8) and ranks.is_distributed and not ranks.is_main
    environment(RANK=0)
    assert read_ranks().is_main


def test_older_launchers_give_a_flag(environment):
    environment(RANK=1, WORLD_SIZE=2)
    assert read_ranks(local_rank=1) == Ranks(1, 1, 2)
    environment(LOCAL_RANK=0)
    assert read_ranks(local_rank=1).local_rank == 0, "the variable wins"


@pytest.mark.parametrize(
    ("variables", "flag"),
    [({}, 0), ({"LOCAL_RANK": 0}, -1), ({"RANK": 0, "WORLD_SIZE": 2}, -1), ({"RANK": 1, "LOCAL_RANK": 1}, -1)],
)
def test_half_a_launcher_is_refused(variables, flag, environment):
    environment(**variables)
    with pytest.raises(ValueError, match="torchrun --nproc_per_node"):
        read_ranks(flag)


# ---- process group --------------------------------------------------------------------------------------------------


@pytest.fixture
def group(environment, monkeypatch):
    """A real process group of this process alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    ranks = read_ranks()
    distributed.start_processes(ranks, CPU)
    yield ranks
    distributed.stop_processes()
    rendezvous.fresh_store.cache_clear()


def test_group_of_one(group):
    distributed.start_processes(group, CPU)  # a second call is harmless
    assert torch.distributed.get_backend() == "gloo"
    with first_on_each_machine(0):
        pass
    model = nn.BatchNorm1d(2)
    distributed.broadcast_tensors(model.state_dict().values())  # two types in one go
    assert model.running_var.tolist() == [1, 1] and model.num_batches_tracked == 0
    assert distributed.gather_lists([(torch.ones(1), "a")]) == [(torch.ones(1), "a")]
    assert distributed.gather_lists([]) == [] and distributed.from_rank_zero("a") == "a"
    assert distributed.gather_everywhere(3) == [3]
    model = nn.Linear(2, 2)
    assert distributed.data_parallel(model, CPU, group, "0,1", sync_bn=True) is model, (
        "it has nobody to share gradients with"
    )
    wrapped = distributed.data_parallel(model, CPU, Ranks(0, 0, 2), sync_bn=True)
    assert wrapped is not model and unwrap(wrapped) is model
    distributed.stop_processes()
    assert not torch.distributed.is_initialized()


def test_nccl_is_told_its_gpu(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *words, **names: calls.append((words, names)))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(rendezvous, "fresh_store", lambda *place: place)
    distributed.start_processes(Ranks(1, 1, 2), torch.device("cuda", 1))
    place = {"store": (1, 2), "rank": 1, "world_size": 2, "timeout": rendezvous.WAIT}
    assert calls == [(("nccl",), place | {"device_id": torch.device("cuda", 1)})]
    assert timedelta(minutes=10) < rendezvous.WAIT, "rank 0 may need longer for a validation"


def test_what_keeps_processes_apart_is_one_sentence(monkeypatch):
    def fail(*words, **names):
        raise torch.distributed.DistBackendError("NCCL error in init\nLast error: shared memory")

    monkeypatch.setattr(torch.distributed, "init_process_group", fail)
    monkeypatch.setattr(rendezvous, "fresh_store", lambda *place: None)
    for device, advice in ((torch.device("cuda", 1), "NCCL_P2P_DISABLE=1"), (CPU, "GLOO_SOCKET_IFNAME")):
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        with pytest.raises(ValueError, match=f"cannot exchange data.*{advice}.*NCCL error in init"):
            distributed.start_processes(Ranks(1, 1, 2), device)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match="several GPUs need NCCL"):
        distributed.start_processes(Ranks(1, 1, 2), torch.device("cuda", 1))


def test_a_lost_process_is_one_sentence():
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1\nmore")
    for error in (gloo, torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0.\nmore")):
        sentence = distributed.lost_process(error)
        assert "another process of this run has ended" in sentence and "more" not in sentence
    assert distributed.lost_process(RuntimeError("shapes differ")) is None


def test_the_model_itself_with_batch_statistics_of_all_processes(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2))
    ranks = Ranks(0, 0, 2)
    assert distributed.without_wrapper(model, CPU, ranks, sync_bn=True) is model
    monkeypatch.setattr(nn.Module, "to", lambda self, device: self)
    found = distributed.without_wrapper(model, torch.device("cuda", 0), ranks, sync_bn=True)
    assert found is model and isinstance(found[1], nn.SyncBatchNorm)
    assert not isinstance(distributed.without_wrapper(nn.BatchNorm2d(2), CPU, ranks), nn.SyncBatchNorm)


def test_one_process_of_a_launcher_uses_one_gpu(caplog):
    model, gpu = nn.Linear(2, 2), torch.device("cuda", 0)
    assert distributed.data_parallel(model, gpu, Ranks(0, 0, 1), "0,1", sync_bn=True) is model and not caplog.text


def test_nothing_happens_in_a_single_process():
    distributed.start_processes(Ranks(), CPU)
    assert not torch.distributed.is_initialized()
    distributed.stop_processes()
    indices, model = [1, 2], nn.Linear(1, 1)
    assert distributed.from_rank_zero(indices) is indices
    assert distributed.data_parallel(model, CPU, Ranks()) is model and unwrap(model) is model
    assert unwrap(nn.DataParallel(model)) is model


FIRST, LATER = ["body", "barrier"], ["barrier", "body"]


@pytest.mark.parametrize(
    ("rank", "local_rank", "expected"),
    [(-1, None, ["body"]), (0, None, FIRST), (1, None, LATER), (0, 0, FIRST), (1, 1, LATER), (2, 0, FIRST)],
)  # fmt: skip
def test_one_process_of_each_machine_goes_first(rank, local_rank, expected, monkeypatch, environment):
    if local_rank is not None:
        environment(LOCAL_RANK=local_rank)
    calls = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: calls.append("barrier"))
    with first_on_each_machine(rank):
        calls.append("body")
    assert calls == expected


def test_the_others_do_not_wait_for_a_first_one_that_failed(monkeypatch, environment):
    calls = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: calls.append("barrier"))
    with pytest.raises(KeyError), first_on_each_machine(0):
        raise KeyError
    assert calls == ["barrier"]


def test_nobody_waits_without_a_group():
    for rank in (-1, 0, 1):
        with first_on_each_machine(rank):
            pass


# ---- devices --------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(environment, monkeypatch):
    """`gpus(n)`: torch sees n GPUs, or fewer if CUDA_VISIBLE_DEVICES names fewer."""
    environment(CUDA_VISIBLE_DEVICES="unset")  # so that monkeypatch puts back what the tests write

    def see(number):
        def count():
            visible = os.environ["CUDA_VISIBLE_DEVICES"]
            return number if visible == "unset" else sum(int(i) < number for i in visible.split(","))

        properties = SimpleNamespace(name="Some GPU", total_memory=80 * 2**30)
        monkeypatch.setattr(torch.cuda, "device_count", count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count() > 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)

    return see


def test_cpu(gpus, caplog):
    gpus(1)
    with caplog.at_level(logging.INFO):
        assert select_device("cpu") == CPU and select_device("CPU ", batch_size=3) == CPU
    assert "Device: CPU, torch" in caplog.text and os.environ["CUDA_VISIBLE_DEVICES"] == "unset"
    gpus(0)
    assert select_device("") == CPU and select_device() == CPU


def test_first_gpu_by_default(gpus, caplog):
    gpus(2)
    with caplog.at_level(logging.INFO):
        assert select_device("") == torch.device("cuda", 0)
    assert "cuda:0 Some GPU, 81920 MB" in caplog.text and os.environ["CUDA_VISIBLE_DEVICES"] == "unset"


@pytest.mark.parametrize(("text", "visible"), [("1", "1"), ("cuda:1", "1"), (0, "0"), ("0,1", "0,1")])
def test_named_gpus(text, visible, gpus):
    gpus(2)
    assert select_device(text, batch_size=4) == torch.device("cuda", 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_each_process_takes_its_gpu(gpus):
    gpus(2)
    assert select_device("", 3, Ranks(3, 1, 4)) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="4 processes were started, but only 2 GPUs"):
        select_device("", 8, Ranks(2, 2, 4))


@pytest.mark.parametrize("text", ["tpu", "0,", "-1", "cuda:x", "0;1", "²", "0,٣"])
def test_unknown_devices(text, gpus):
    gpus(1)
    with pytest.raises(ValueError, match="--device .* is unknown: give cpu, 0, or a list like 0,1"):
        select_device(text)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "unset"


def test_missing_gpus(gpus):
    gpus(0)
    with pytest.raises(ValueError, match="--device 0 asks for a GPU.*use --device cpu"):
        select_device("0")
    gpus(1)
    with pytest.raises(ValueError, match="--device 0,3 names 2 GPUs, but 1 can be seen"):
        select_device("0,3")


def test_what_a_run_will_not_find_is_told_without_taking_anything(gpus, monkeypatch):
    gpus(2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("", "cpu", "1", "0,1"):
        check_device(device)
    with pytest.raises(ValueError, match="--device 0,2 names GPU 2, but 2 can be seen"):
        check_device("0,2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device 0 asks for a GPU.*use --device cpu"):
        check_device("0")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_device("0")  # a run makes it visible
    with pytest.raises(ValueError, match="is unknown"):
        check_device("gpu")


def test_batch_divides_among_the_gpus(gpus):
    gpus(2)
    with pytest.raises(ValueError, match="--batch-size 5 does not divide among 2 GPUs"):
        select_device("0,1", batch_size=5)


# ---- seeds ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cudnn_flags():
    flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags


def draws(seed):
    init_seeds(seed)
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_seeds_are_reproducible(cudnn_flags):
    assert draws(3) == draws(3)
    assert all(a != b for a, b in zip(draws(3), draws(4), strict=True))


def test_seed_0_makes_cudnn_deterministic(cudnn_flags):
    init_seeds(0)
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    init_seeds(1)
    assert torch.backends.cudnn.benchmark and not torch.backends.cudnn.deterministic

"""Losses that come back in blocks: order, means, what is told about those that are not finite."""

import pytest
import torch

from utils.fast.loss_readback import NonFinite, ReadBack, describe

CPU = torch.device("cpu")


def items(i):
    return torch.tensor([i, 2.0 * i, 3.0 * i, 6.0 * i])


def test_items_come_in_blocks_and_in_order():
    losses, known = ReadBack(3, CPU), []
    for i in range(8):
        losses.add(items(i), i, ("a.jpg",))
        known.append(losses.known())
    assert [len(rows) for rows in known] == [0, 0, 3, 0, 0, 3, 0, 0]
    rest = losses.rest()
    assert torch.equal(torch.cat([*known, rest]), torch.stack([items(i) for i in range(8)]))
    assert losses.rest().shape == (0, 4) and losses.known().shape == (0, 4)
    assert (losses.statistics.steps, losses.statistics.blocks) == (8, 3)
    assert "8 losses read back in 3 blocks" in str(losses.statistics)


def test_items_may_be_overwritten_after_they_were_added():
    losses, static = ReadBack(2, CPU), torch.zeros(4)
    for i in range(2):
        static.copy_(items(i))
        losses.add(static, i, ())
    static.fill_(-1)
    assert torch.equal(losses.known(), torch.stack((items(0), items(1))))


class Late:
    """An event that has not happened for some queries."""

    def __init__(self, queries):
        self.left, self.waited = queries, False

    def query(self):
        self.left -= 1
        return self.left < 0 or self.waited

    def synchronize(self):
        self.waited = True


def test_nobody_waits_for_a_block_that_is_on_its_way():
    losses = ReadBack(1, CPU)
    for i in range(2):
        losses.add(items(i), i, ())
    first, second = Late(1), Late(9)
    for block, event in zip(losses.on_the_way, (first, second), strict=True):
        block.arrived = event
    assert len(losses.known()) == 0 and not first.waited
    assert torch.equal(losses.known(), items(0)[None]), "the second is on its way"
    assert torch.equal(losses.rest(), items(1)[None]) and second.waited


def test_a_loss_that_is_not_finite_is_reported_with_step_and_files(caplog):
    losses = ReadBack(4, CPU)
    for i in range(8):
        losses.add(items(float("nan") if i in (1, 3) else i), 100 + i, (f"{i}.jpg", "b.jpg"))
        losses.known()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "iteration 101" in record.message and "1.jpg, b.jpg" in record.message
    assert "in 1 more" in record.message


def test_long_lists_of_files_are_cut():
    text = describe([(7, tuple(f"{i}.jpg" for i in range(64)))])
    assert text == "the loss was not finite in iteration 7 (images: 0.jpg, 1.jpg, 2.jpg, 3.jpg and 60 more)"


def test_an_unbroken_row_stops_the_run():
    losses = ReadBack(10, CPU)
    assert losses.non_finite.most == 20
    with pytest.raises(ValueError, match=r"20 steps in a row, since iteration 5 \(5.jpg\).*checkpoint"):
        for i in range(40):
            losses.add(items(float("inf") if i >= 5 else i), i, (f"{i}.jpg",))
            losses.known()
    assert ReadBack(50, CPU).non_finite.most == 50


def test_a_good_step_ends_the_row():
    losses, watch = ReadBack(1, CPU), NonFinite(3)
    losses.non_finite = watch
    for i in range(12):
        losses.add(items(i if i % 3 == 2 else float("nan")), i, ())
        losses.known()
    assert watch.row == []


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_the_values_are_those_of_their_step():
    device = torch.device("cuda")
    losses, static = ReadBack(5, device), torch.zeros(4, device=device)
    expected = torch.stack([items(i) for i in range(23)])
    values, found = expected.to(device), []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(23):
            torch.cuda._sleep(1_000_000)
            static.copy_(values[i])
            losses.add(static, i, ())
            found.append(losses.known())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rest = losses.rest()
    assert len(rest) >= 3 and torch.equal(torch.cat([*found, rest]), expected)
    assert losses.statistics.longest > 0

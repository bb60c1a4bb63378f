"""The model of a step's traffic: its sums by hand and against known ones, and the rates that were measured."""

from pathlib import Path

import pytest

from models.yolo import Model
from tools import roofline
from tools.roofline import FORMS, GPUS, MEASURED, Operation

JOBS = [(f"cfg/training/{name}.yaml", side, batch) for name, side, batch in MEASURED["planned"]]
SMALL = {
    "nc": 2, "depth_multiple": 1.0, "width_multiple": 1.0, "anchors": [[10, 13, 16, 30]],
    "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 1, 1]], [-2, 1, "Conv", [16, 1, 1]],
                 [[-1, -2], 1, "Concat", [1]], [-1, 1, "MP", []], [-1, 1, "SP", [5]]],
    "head": [[[-1], 1, "Detect", ["nc", "anchors"]]],
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    import yaml

    path = tmp_path_factory.mktemp("cfg") / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return str(path)


def test_operations_of_a_small_network_by_hand(small):
    side, quarter = 64 * 64 * 3, 32 * 32
    found = roofline.operations(small, 64)
    assert [operation.kind for operation in found if operation.kind not in ("stem norm", "norm", "activation")] == [
        "images", "stem", "convolution", "merged fork", "merged", "cat", "halving", "pool", "output", "head", "loss",
        "weights",
    ]  # fmt: skip
    by_kind = {operation.kind: operation for operation in found}
    assert by_kind["stem"] == Operation("stem", side, 8 * quarter, 8 * 27, 8 * quarter * 27, 32 / 27)
    assert by_kind["stem norm"].y == 8 * quarter
    assert by_kind["merged fork"][1:3] == (8 * quarter,) * 2 and by_kind["cat"][1:3] == (32 * quarter,) * 2
    assert by_kind["halving"][1:3] == (32 * quarter, 8 * quarter)
    assert by_kind["weights"].w == sum(p.numel() for p in Model(small).parameters())


def test_bytes_of_kernels_by_hand(small):
    rows = {
        (kind, kernel.name): (moved, flops) for kind, kernel, moved, flops in roofline.kernels(small, 64, 10, "planned")
    }
    y, images = 32 * 32 * 32 * 10, 64 * 64 * 3 * 10
    assert rows["images", "border"][0] == images + 2 * images
    assert rows["halving", "maximum"][0] == 2 * y + 3 * y // 4  # half in; half and a byte of a quarter out
    assert rows["pool", "gradient"][0] == (2 + 1 + 2) * y // 4
    assert rows["stem", "convolution, statistics"][1] == 2 * 10 * roofline.operations(small, 64)[1].macs * 32 / 27
    assert ("stem", "data gradient") not in rows and not any(kind == "cat" for kind, _ in rows)
    # the second convolution of a map reads no input of its own
    assert rows["merged", "convolution"][0] == rows["convolution", "convolution"][0] - 2 * 8 * 32 * 32 * 10
    plain = {kernel.name: moved for kind, kernel, moved, _ in roofline.kernels(small, 64, 10, "plain") if kind == "cat"}
    assert plain["concatenation"] == 4 * y
    moved = {form: sum(row[2] for row in roofline.kernels(small, 64, 10, form)) for form in FORMS}
    assert moved["plain"] > 1.3 * moved["planned"] > 0


def test_a_map_is_written_twice_that_a_concatenation_and_a_convolution_read(tmp_path):
    import yaml

    path = tmp_path / "twice.yaml"
    chain = [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 1, 1]], [-1, 1, "Conv", [16, 3, 1]],
             [[-1, -2], 1, "Concat", [1]], [-1, 1, "Conv", [8, 1, 1]]]  # fmt: skip
    path.write_text(yaml.safe_dump(SMALL | {"backbone": chain, "head": [[[-1], 1, "Detect", ["nc", "anchors"]]]}))
    found = roofline.operations(str(path), 64)
    assert [operation.x for operation in found if operation.kind == "place"] == [16 * 32 * 32]
    assert [operation.kind for operation in found].count("fork") == 1


@pytest.mark.parametrize(
    ("job", "gflops", "outputs"), [(JOBS[0], 10.3, 5.49), (JOBS[2], 79.3, 22.4), (JOBS[3], 317, 89.7)]
)
def test_operations_and_outputs_of_an_image(job, gflops, outputs):
    """GFLOP of a training step and million numbers that convolutions put out, as they were counted by other means."""
    found = roofline.operations(*job[:2])
    convolutions = [operation for operation in found if operation.macs]
    passes = sum(operation.macs * (2 if operation.kind == "stem" else 3) for operation in convolutions)
    assert 2 * passes / 1e9 == pytest.approx(gflops, rel=0.02)
    assert sum(operation.y for operation in convolutions) / 1e6 == pytest.approx(outputs, rel=0.02)


@pytest.mark.parametrize("form", MEASURED)
def test_measured_rates_are_predicted_within_15_percent(form):
    for job in JOBS:
        for gpu, measured in MEASURED[form][(Path(job[0]).stem, *job[1:])].items():
            assert abs(roofline.rate(*job, form, gpu) / measured - 1) < 0.15, (form, job, gpu)


def test_tables(capsys, small):
    roofline.main(roofline.parser().parse_args(["--kernels", "5090", "--form", "planned", "plain"]))
    lines = capsys.readouterr().out.splitlines()
    rates = [line for line in lines if line.startswith("| yolov7")]
    assert len(rates) == 2 * len(JOBS) * len(GPUS)
    assert all("predicted, not measured" in line for line in rates if "| 4090 |" in line or "| 5090 |" in line)
    assert (
        "15276: " in rates[1]
        and "not measured" in rates[0]
        and sum("ms on 5090" in line for line in lines) == 2 * len(JOBS)
    )
    roofline.main(roofline.parser().parse_args(["--cfg", small, "--img", "128", "--batch", "3"]))
    assert "| small 128 px batch 3 | planned | H100 |" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--img", "100"], ["--batch", "0"], ["--cfg", "missing.yaml"]])
def test_wrong_input(options):
    with pytest.raises(ValueError, match="give multiples of 64|does not exist"):
        roofline.main(roofline.parser().parse_args(options))

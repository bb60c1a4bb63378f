"""Head configurations from data sets: groups by shape and by count."""

import numpy as np
import pytest

from tests.small_run import make_data
from tools import group_classes as tool
from utils.head_config import HeadConfig


class Scanned:
    labels = [
        np.array([[0, 0.5, 0.5, 0.5, 0.25], [2, 0.5, 0.5, 0.1, 0.1]], np.float32),
        np.zeros((0, 5), np.float32),
        np.array([[0, 0.5, 0.5, 0.25, 0.25], [1, 0.5, 0.5, 0.0, 0.1]], np.float32),
    ]
    shapes = np.array([[100.0, 200.0], [50.0, 50.0], [100.0, 100.0]])


def test_statistics_by_hand():
    counts, shapes = tool.box_statistics(Scanned, 4)
    assert counts.tolist() == [2, 0, 1, 0]  # a box without area has no shape
    assert shapes[0] == pytest.approx([(np.log(0.125) + np.log(0.0625)) / 2, 0.0])  # 50x50 and 25x25 pixels
    assert shapes[2] == pytest.approx([np.log(0.01), np.log(0.5)])
    assert not shapes[[1, 3]].any()


def test_alike_shapes_share_a_head():
    shapes = np.array([[-1.0, 0.0], [-5.0, 0.1], [-1.1, 0.1], [-5.1, 0.0], [-3.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    counts = np.array([5, 5, 5, 5, 5, 0, 0])
    groups = tool.make_groups(counts, shapes, 3, "shape")
    assert groups == [[0, 2], [1, 3], [4, 5, 6]]  # classes without boxes go where there are few
    assert tool.make_groups(counts, shapes, 3, "shape") == groups


def test_equal_shapes_leave_no_head_empty():
    groups = tool.make_groups(np.ones(5, int), np.zeros((5, 2)), 3, "shape")
    assert len(groups) == 3 and all(groups) and sorted(sum(groups, [])) == [0, 1, 2, 3, 4]


def test_equal_counts():
    groups = tool.make_groups(np.array([10, 7, 4, 3, 0]), np.zeros((5, 2)), 2, "count")
    assert groups == [[0, 3, 4], [1, 2]] or groups == [[0, 3], [1, 2, 4]]  # 13 and 11 boxes


def test_too_few_classes():
    with pytest.raises(ValueError, match="--heads 3: only 2 classes have boxes"):
        tool.make_groups(np.array([1, 0, 2]), np.zeros((3, 2)), 3, "count")


@pytest.mark.parametrize("by", ["shape", "count"])
def test_the_file_is_a_head_configuration(by, tmp_path):
    data, out = make_data(tmp_path), tmp_path / "new" / "heads.yaml"
    tool.main(tool.parser().parse_args(["--data", str(data), "--heads", "2", "--by", by, "--out", str(out)]))
    config = HeadConfig(out)
    assert sorted(config.head_classes) == [[0], [1]] and config.grouping == f"by {by}"
    assert sorted(config.head_names) == ["green", "red"]


@pytest.mark.parametrize("name", ["a\nb: c: d.yaml", "a\udcff.yaml"])
def test_odd_names_of_data_yamls(name, tmp_path):
    data = make_data(tmp_path).rename(tmp_path / name)
    tool.main(tool.parser().parse_args(["--data", str(data), "--heads", "2", "--out", str(tmp_path / "heads.yaml")]))
    assert (tmp_path / "heads.yaml").read_text().splitlines()[1] == "nc: 2"


@pytest.mark.parametrize("seed", ["-1", "4294967277"])
def test_seeds_that_are_none(seed, tmp_path):
    with pytest.raises(ValueError, match=f"--seed {seed} has to be between 0 and 4294967276"):
        tool.main(tool.parser().parse_args(["--data", str(make_data(tmp_path)), "--heads", "2", "--seed", seed]))


def test_the_data_yaml_is_not_written_over(tmp_path):
    data = make_data(tmp_path)
    text = data.read_text()
    with pytest.raises(ValueError, match="--out .*data.yaml is read by this command and would be lost"):
        tool.main(tool.parser().parse_args(["--data", str(data), "--heads", "2", "--out", str(data)]))
    assert data.read_text() == text
    for _ in range(2):  # what it wrote itself has any name
        tool.main(tool.parser().parse_args(["--data", str(data), "--heads", "2", "--out", str(tmp_path / "groups")]))
    assert (tmp_path / "groups").read_text().startswith("# --head-config: the classes of")

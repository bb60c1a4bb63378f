import os
from pathlib import Path

import numpy as np
import pytest

from tests import golden_data, parity
from tests.label_sets import BOX, TRIANGLE, make_dataset
from utils.config.data_yaml import DataConfig
from utils.data.labels import scan
from utils.data.labels.scan import check_class_ids, check_has_boxes, check_labels, scan_dataset


def stems(scanned):
    return [Path(file).stem for file in scanned.img_files]


@pytest.mark.parametrize("name", ["all", "boxes", "polys"])
def test_golden_data_set(tmp_path, name):
    """Everything that stock read from its own format, read again; nothing in it needs a repair."""
    folder = golden_data.copy_dataset(tmp_path)
    golden = golden_data.index()[f"a_parsed_{name}"]
    group = "data: parsed labels"
    for source in ("files", "cache"):
        scanned = scan_dataset(folder / f"{name}.txt")
        counts = [scanned.counts[key] for key in ("found", "missing", "empty", "dropped", "total")]
        parity.check(group, f"{name} {source} counts", counts, golden["results"])
        for key, paths in {"img": scanned.img_files, "lab": scanned.label_files}.items():
            actual = [os.path.relpath(path, folder) for path in paths]
            parity.check(group, f"{name} {source} {key}", actual, [item[key] for item in golden["items"]])
        parity.check(group, f"{name} {source} sizes", scanned.shapes, [item["wh"] for item in golden["items"]])
        assert len(scanned.labels) == len(scanned.segments) == len(golden["items"])
        for item, rows, segments in zip(golden["items"], scanned.labels, scanned.segments, strict=True):
            place = f"{name} {source} {item['img']}"
            parity.check(group, place, rows, np.array(item["labels"], np.float32).reshape(-1, 5))
            assert len(segments) == len(item["segments"]), place
            for index, (points, expected) in enumerate(zip(segments, item["segments"], strict=True)):
                parity.check(group, f"{place} polygon {index}", points, np.array(expected, np.float32))
        assert [finding.effect for finding in scanned.findings] == [scan.NO_LABEL_FILE]


def test_counts_and_reasons(tmp_path, caplog):
    texts = {
        "a": BOX,
        "b": "",
        "c": None,
        "d": f"{BOX}\n{BOX}\nred 0 0 0 0",
        "e": "1.7 0.5 0.5 0.4 0.4",
        "f": TRIANGLE,
        "g": BOX,
    }
    folder = make_dataset(tmp_path, texts)
    (tmp_path / "images/train/g.jpg").write_bytes(b"")
    scanned = scan_dataset(folder, "train: ")
    assert scanned.counts == {
        "found": 4,
        "missing": 1,
        "empty": 1,
        "dropped": 2,
        "total": 7,
        "dropped_rows": 3,
        "repaired_rows": 0,
    }
    assert stems(scanned) == list("abcdf")
    assert [len(rows) for rows in scanned.labels] == [1, 0, 0, 1, 1]
    assert [len(segments) for segments in scanned.segments] == [0, 0, 0, 0, 1]
    assert scanned.shapes.dtype == np.float64
    assert scanned.shapes.tolist() == [[16, 12]] * 5
    assert all(message.startswith("train: ") for message in caplog.messages)
    report = "\n".join(caplog.messages)
    for words in (
        "c.jpg (looked for ",
        "labels/train/c.txt)",
        "d.txt:2",
        "d.txt:3 'red'",
        "e.txt:1 1.7",
        "no usable row in its label file: ",
        "empty file (0 bytes): ",
    ):
        assert words in report


def test_many_equal_reasons_make_one_line(tmp_path, caplog):
    scan_dataset(make_dataset(tmp_path, {f"{n:02}": f"{BOX}\n{BOX}" for n in range(12)}))
    assert len(caplog.messages) == 1
    assert "row dropped (12x)" in caplog.messages[0]
    assert caplog.messages[0].endswith("and 7 more")


def test_encodings_of_label_files(tmp_path):
    texts = {encoding: BOX.encode(encoding) for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32")}
    scanned = scan_dataset(make_dataset(tmp_path, texts | {"latin": b"# f\xfcr\n" + BOX.encode()}))
    assert len(scanned.labels) == 6
    for rows in scanned.labels:
        np.testing.assert_array_equal(rows, np.float32([[0, 0.5, 0.5, 0.4, 0.4]]))


def test_a_folder_in_place_of_a_label_file(tmp_path):
    folder = make_dataset(tmp_path, {"a": BOX, "b": None})
    (tmp_path / "labels/train/b.txt").mkdir()
    assert stems(scan_dataset(folder)) == ["a"]


def test_a_label_file_that_was_not_fetched(tmp_path):
    folder = make_dataset(tmp_path, {"a": BOX, "b": "version https://git-lfs.github.com/spec/v1\noid sha256:4\n"})
    assert scan_dataset(folder).messages == [
        "image dropped (1x): label file is a Git LFS pointer, fetch the file with git lfs pull: "
        f"{tmp_path / 'labels/train/b.txt'}"
    ]


def test_a_label_file_that_is_a_link_to_nowhere(tmp_path):
    """As where the disk with the labels is not there: no background, also where the cache knows of no label."""
    folder = make_dataset(tmp_path, {"a": BOX, "b": None})
    assert stems(scan_dataset(folder)) == ["a", "b"]
    label = tmp_path / "labels/train/b.txt"
    label.symlink_to(tmp_path / "away.txt")
    scanned = scan_dataset(folder)
    assert stems(scanned) == ["a"]
    assert scanned.messages == [f"image dropped (1x): label file is a link that leads nowhere: {label}"]
    (tmp_path / "away.txt").write_text(BOX)
    assert stems(scan_dataset(folder)) == ["a", "b"]


def test_a_label_folder_that_is_a_link_to_nowhere(tmp_path):
    folder = make_dataset(tmp_path, {"a": None, "b": None})
    (tmp_path / "labels/train").rmdir()
    assert stems(scan_dataset(folder)) == ["a", "b"], "background"
    (tmp_path / "labels/train").symlink_to(tmp_path / "away")
    with pytest.raises(ValueError, match=r"label folder is a link \(.*labels/train\) that leads nowhere"):
        scan_dataset(folder)
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "a.txt").write_text(BOX)
    assert [len(rows) for rows in scan_dataset(folder).labels] == [1, 0]


def test_an_empty_label_that_is_a_link_to_a_device(tmp_path):
    folder = make_dataset(tmp_path, {"a": BOX, "b": None})
    (tmp_path / "labels/train/b.txt").symlink_to(os.devnull)
    scanned = scan_dataset(folder)
    assert stems(scanned) == ["a", "b"] and scanned.counts["empty"] == 1 and not scanned.messages


def test_nothing_usable_is_an_error_with_reasons(tmp_path):
    folder = make_dataset(tmp_path, {"a": BOX})
    (tmp_path / "images/train/a.jpg").write_bytes(b"<html>")
    with pytest.raises(
        ValueError,
        match=r"none of the 1 images can be used.*not an image but a web page .HTML., the download failed: .*a.jpg",
    ):
        scan_dataset(folder)


def test_file_names_that_are_no_text(tmp_path, caplog):
    folder = Path(make_dataset(tmp_path, {"a": None}))
    odd = os.fsdecode(os.fsencode(folder) + b"/\xff.jpg")
    Path(folder, "a.jpg").rename(odd)
    for _ in range(2):
        assert scan_dataset(folder).img_files == [odd]
    caplog.text.encode("utf-8")


# --- checks before training -------------------------------------------------------------------------------------------


def test_class_ids_in_range_pass():
    check_class_ids([np.zeros((0, 5), np.float32), np.float32([[1, 0.5, 0.5, 1, 1]])], ["a.txt", "b.txt"], 2)
    check_class_ids([], [], 1)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ("12", r"0\.\.1 \(nc is 2: red, green\), but 1 label file\(s\).*worst id is 2: .*b\.txt:1; .*1-based"),
        ("077", r"2 label file\(s\).*worst id is 7: .*b\.txt:1, .*c\.txt:1; ids start at 0$"),
        ("0-", r"1 label file\(s\).*worst id is -1: .*b\.txt:1"),
    ],
)
def test_class_ids_out_of_range(tmp_path, ids, expected):
    texts = {name: f"{'-1' if i == '-' else i} 0.5 0.5 0.4 0.4" for name, i in zip("abc", ids, strict=False)}
    scanned = scan_dataset(make_dataset(tmp_path, texts))
    with pytest.raises(ValueError, match=expected):
        check_class_ids(scanned.labels, scanned.label_files, 2, ["red", "green"])


def test_a_bad_id_is_found_behind_a_polygon_and_a_comment(tmp_path):
    scanned = scan_dataset(make_dataset(tmp_path, {"a": f"# classes\n{BOX}\n\n{TRIANGLE}\n7 .1 .1 .3 .1 .3 .3"}))
    with pytest.raises(ValueError, match=r"a\.txt:5"):
        check_class_ids(scanned.labels, scanned.label_files, 2)


def test_a_training_set_without_boxes(tmp_path):
    empty = scan_dataset(make_dataset(tmp_path / "empty", {"a": "", "b": "\n", "c": None}))
    with pytest.raises(ValueError, match=r"no boxes in 2 label files, e\.g\. .*a\.txt; --allow-background"):
        check_has_boxes(empty.labels, empty.label_files)
    unlabelled = scan_dataset(make_dataset(tmp_path / "none", {"a": None}))
    with pytest.raises(ValueError, match=r"no label files for 1 image, e\.g\. .*labels/train/a\.txt does not exist"):
        check_has_boxes(unlabelled.labels, unlabelled.label_files)
    check_has_boxes([np.zeros((0, 5)), np.zeros((1, 5))], ["a.txt", "b.txt"])


# --- the summary and --strict-data ------------------------------------------------------------------------------------


def test_one_line_sums_up(tmp_path, caplog):
    texts = {"a": BOX, "b": "", "c": None, "d": f"{BOX}\n{BOX}", "e": f"{BOX} 0.9", "f": "red 0 0 0 0"}
    folder = make_dataset(tmp_path, texts)
    Path(folder, "g.gif").touch()
    with caplog.at_level("INFO"):
        scan_dataset(folder, "train: ")
    assert caplog.messages[0] == (
        "train: 6 images, 3 objects, 1 of them empty, 1 without a label file, 1 dropped, 1 row repaired, "
        "2 rows dropped, file ignored"
    )
    reasons = ("labels missing", "no usable row", "sixth column", "repeats an earlier", "class is text", "suffix")
    assert all(any(reason in message for message in caplog.messages[1:]) for reason in reasons)


def test_a_healthy_set_is_summed_up_without_reasons(tmp_path, caplog):
    folder = make_dataset(tmp_path, {"a": BOX, "b": TRIANGLE})
    for _ in range(2):  # from the files, then from the cache
        caplog.clear()
        with caplog.at_level("INFO"):
            scan_dataset(folder)
        assert caplog.messages == ["2 images, 2 objects"]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"b": f"{BOX}\n{BOX}"}, "row dropped .*b.txt:2"),
        ({"b": "red 0 0 0 0"}, "image dropped .*b.txt"),
        ({"b": f"{BOX}\n{BOX} 1"}, "row dropped"),  # the confidence is ignored, then the row repeats
    ],
)
def test_strict_data_stops_at_a_drop(texts, said, tmp_path):
    scanned = scan_dataset(make_dataset(tmp_path, {"a": BOX} | texts))
    with pytest.raises(ValueError, match=f"--strict-data: .*{said}.*Repair them"):
        scan.check_nothing_dropped(scanned.findings)


def test_strict_data_minds_list_entries(tmp_path):
    make_dataset(tmp_path, {"a": BOX})
    (tmp_path / "list.txt").write_text("images/train/a.jpg\nimages/train/none.jpg\n")
    with pytest.raises(ValueError, match=r"--strict-data: list entry ignored .*list.txt:2"):
        scan.check_nothing_dropped(scan_dataset(tmp_path / "list.txt").findings)


def test_strict_data_lets_repairs_and_background_pass(tmp_path):
    scanned = scan_dataset(make_dataset(tmp_path, {"a": f"{BOX} 0.9", "b": None, "c": "", "d": "0 1.001 0.5 0.1 0.1"}))
    assert len(scanned.findings) == 3
    scan.check_nothing_dropped(scanned.findings)


# --- label files that are shared, or lie next door --------------------------------------------------------------------


def test_labels_next_door_are_no_background(tmp_path, caplog):
    folder = make_dataset(tmp_path, dict.fromkeys("abcd") | {"e": BOX})
    (tmp_path / "labels/train/a.TXT").write_text(BOX)
    Path(folder, "b.txt").write_text(BOX)
    Path(folder, "c.xml").write_text("<annotation/>")
    for _ in range(2):  # from the files, then from the cache
        caplog.clear()
        scanned = scan_dataset(folder)
        assert [(finding.effect, finding.times) for finding in scanned.findings] == [
            (scan.LABEL_ELSEWHERE, 2), (scan.LABEL_ELSEWHERE, 1), (scan.NO_LABEL_FILE, 1),
        ]  # fmt: skip
        for file in (tmp_path / "labels/train/a.TXT", Path(folder, "b.txt"), Path(folder, "c.xml")):
            assert f"there is {file})" in caplog.text
    with pytest.raises(ValueError, match=r"--strict-data: label file elsewhere, .*a\.TXT"):
        scan.check_nothing_dropped(scanned.findings)
    (tmp_path / "labels/train/e.txt").unlink()
    scanned = scan_dataset(folder)
    with pytest.raises(ValueError, match=r"no label files for 5 images.*there is .*a\.TXT.*--allow-background"):
        check_has_boxes(scanned.labels, scanned.label_files, scanned.findings)


@pytest.mark.parametrize("other", ["a.png", "a.JPG", "a.jpeg"])
def test_two_images_with_one_label_file(other, tmp_path, caplog):
    folder = make_dataset(tmp_path, {"a": BOX, "b": None, "c": BOX})
    for name in (other, "b.png"):  # nothing is shared without a label file
        Path(folder, name).write_bytes(Path(folder, "a.jpg").read_bytes())
    for _ in range(2):
        caplog.clear()
        scanned = scan_dataset(folder)
        assert [(finding.effect, finding.times) for finding in scanned.findings] == [
            (scan.LABEL_SHARED, 1), (scan.NO_LABEL_FILE, 2),
        ]  # fmt: skip
        assert all(f"{folder}/{name}" in caplog.text for name in ("a.jpg", other))
    with pytest.raises(ValueError, match="--strict-data: label file shared .*a.txt"):
        scan.check_nothing_dropped(scanned.findings)


def test_strict_data_minds_equal_names(tmp_path):
    scanned = scan_dataset(make_dataset(tmp_path, {"a": BOX}))
    data = DataConfig(None, None, None, 3, ["car", "bus", "car"], False, None, {})
    check_labels(scanned, data)
    with pytest.raises(ValueError, match="--strict-data: the data yaml: 'car' is the name of the classes 0 and 2"):
        check_labels(scanned, data, strict=True)


def test_processes_find_what_threads_find(tmp_path, monkeypatch):
    folder = golden_data.copy_dataset(tmp_path)
    threads = scan_dataset(folder / "all.txt")
    for path in folder.rglob("*.cache"):
        path.unlink()
    pids, verify = tmp_path / "pids", scan.verify_image

    def noted(path):
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return verify(path)

    monkeypatch.setattr(scan, "MANY_IMAGES", 1)
    monkeypatch.setattr(scan, "verify_image", noted)
    processes = scan_dataset(folder / "all.txt")
    assert str(os.getpid()) not in pids.read_text().split()
    assert processes.img_files == threads.img_files and processes.findings == threads.findings
    assert processes.counts == threads.counts and np.array_equal(processes.shapes, threads.shapes)
    for ours, theirs in zip(processes.labels, threads.labels, strict=True):
        assert np.array_equal(ours, theirs)
    for ours, theirs in zip(processes.segments, threads.segments, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))

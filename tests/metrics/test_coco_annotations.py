"""Annotation files of users: every field is checked, entries are named; images and folders are matched."""

import copy
import json
import math

import pytest

from tests.metrics.test_coco import NAMES, annotation_file, collect, data_in, files_in, rows
from utils.metrics import coco
from utils.metrics.coco_annotations import as_id, match_categories, match_images, read_annotations


def changed(folder, place, value):
    """The healthy annotation file with one entry changed; `place` as ("annotations", 1)."""
    path = annotation_file(folder)
    content = json.loads(path.read_text())
    holder = content
    for step in place[:-1]:
        holder = holder[step]
    if value is KeyError:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    path.write_text(json.dumps(content))
    return path


def outcome(folder, caplog):
    """(scores or None, what was said) of a test with the annotation file of `folder`."""
    results = collect(coco.open_results(data_in(folder), "val", NAMES, files_in(folder)), folder)
    try:
        scores = results.score()
    except ValueError as error:
        return None, f"{error}\n{caplog.text}"
    return scores, caplog.text


NAN, INF = math.nan, math.inf
REFUSED = [
    (("images",), {}, "images is an object, not a list"),
    (("annotations",), {"1": {}}, "annotations is an object, not a list"),
    (("annotations",), None, "annotations is null, not a list"),
    (("categories",), KeyError, "it has no categories"),
    (("images", 1), [], r"images\[1\] is \[\], not an object"),
    (("images", 1, "id"), KeyError, r"images\[1\] has no id"),
    (("images", 1, "id"), True, r"images\[1\].id is a truth value, not an id"),
    (("images", 1, "id"), NAN, r"images\[1\].id is nan, not an id"),
    (("images", 1, "id"), 1.5, r"images\[1\].id is 1.5, not an id"),
    (("images", 1, "id"), 10, r"images\[1\].id is 10, as that of images\[0\]"),
    (("images", 1, "id"), "10", r"images\[1\].id is 10, as that of images\[0\]"),
    (("images", 1, "file_name"), KeyError, r"images\[1\] has no file_name"),
    (("images", 1, "file_name"), 3, r"images\[1\].file_name is 3, not the name of a file"),
    (("images", 1, "file_name"), "", r"images\[1\].file_name is '', not the name of a file"),
    (("categories", 0, "id"), None, r"categories\[0\].id is null, not an id"),
    (("categories", 1, "id"), 1.0, r"categories\[1\].id is 1, as that of categories\[0\]"),
    (("categories", 0, "name"), KeyError, r"categories\[0\] has no name"),
    (("categories", 0, "name"), ["cat"], r"categories\[0\].name is \['cat'\], not the name of a class"),
    (("annotations", 2), "x", r"annotations\[2\] is 'x', not an object"),
    (("annotations", 2, "image_id"), KeyError, r"annotations\[2\] has no image_id"),
    (("annotations", 2, "image_id"), {}, r"annotations\[2\].image_id is an object, not an id"),
    (("annotations", 2, "category_id"), KeyError, r"annotations\[2\] has no category_id"),
    (("annotations", 2, "category_id"), INF, r"annotations\[2\].category_id is inf, not an id"),
    (("annotations", 2, "bbox"), KeyError, r"annotations\[2\] has no bbox"),
    (("annotations", 2, "bbox"), None, r"annotations\[2\].bbox is null, not four numbers"),
    (("annotations", 2, "bbox"), [1, 2, 3], r"annotations\[2\].bbox is \[1, 2, 3\], not four numbers"),
    (("annotations", 2, "bbox"), [1, 2, 3, 4, 5], "not four numbers"),
    (("annotations", 2, "bbox"), list(range(99)), "a list of 99 entries, not four numbers"),
    (("annotations", 2, "bbox"), [1, 2, NAN, 4], r"bbox is \[1, 2, nan, 4\], not four numbers"),
    (("annotations", 2, "bbox"), [1, 2, INF, 4], "not four numbers"),
    (("annotations", 2, "bbox"), [1, 2, "3", 4], "not four numbers"),
    (("annotations", 2, "bbox"), [1, 2, True, 4], "not four numbers"),
    (("annotations", 2, "bbox"), [1, 2, -3, 4], "no box in pixels"),
    (("annotations", 2, "bbox"), [1, 2, 10**30, 4], "no box in pixels"),
    (("annotations", 2, "bbox"), {"x": 1}, "bbox is an object, not four numbers"),
    (("annotations", 2, "area"), NAN, r"annotations\[2\].area is nan, not a number of pixels"),
    (("annotations", 2, "area"), -1, "area is -1, not a number of pixels"),
    (("annotations", 2, "area"), "90", "area is '90', not a number of pixels"),
    (("annotations", 2, "area"), 1e11, "not a number of pixels"),
    (("annotations", 2, "iscrowd"), 2, r"annotations\[2\].iscrowd is 2, not 0 or 1"),
    (("annotations", 2, "iscrowd"), "0", "iscrowd is '0', not 0 or 1"),
    (("annotations",), [], "no object of these classes"),
    (("images",), [], "names none of the 3 images"),
    (("categories",), [], r"are not the 2 classes \(not found: cat, dog\)"),
    (("images", 0, "width"), 200, r"images\[0\].width is 200, that of .*a\.jpg 100: are its boxes"),
]


@pytest.mark.parametrize(("place", "value", "message"), REFUSED, ids=lambda value: None)
def test_an_entry_that_cannot_be_used_is_named(tmp_path, caplog, place, value, message):
    changed(tmp_path, place, value)
    results = coco.open_results(data_in(tmp_path), "val", NAMES, files_in(tmp_path))
    for path in files_in(tmp_path):
        results.add(path, rows([10, 10, 50, 50, 0.9, 0]), (100, 100))
    with pytest.raises(ValueError, match=message):
        results.score()
    assert len(results.rows) == 3  # the result file is written all the same


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("images", 1, "id"), 11.0),
        (("images", 1, "id"), "11"),
        (("images", 1, "id"), " 11 "),
        (("annotations", 2, "image_id"), "11"),
        (("annotations", 2, "image_id"), 11.0),
        (("annotations", 2, "image_id"), "11.0"),
        (("annotations", 2, "category_id"), "7"),
        (("categories", 1, "id"), "7"),
        (("annotations", 2, "id"), KeyError),
        (("annotations", 2, "id"), 0),
        (("annotations", 2, "id"), None),
        (("annotations", 2, "iscrowd"), False),
        (("annotations", 2, "iscrowd"), None),
        (("annotations", 2, "area"), None),
        (("annotations", 2, "segmentation"), {"counts": "PPYo0", "size": [100, 100]}),
        (("annotations", 2, "segmentation"), [[]]),
        (("images", 0, "width"), "100"),
        (("images", 0, "width"), 0),
        (("images", 0, "width"), KeyError),
        (("info",), None),
    ],
    ids=lambda value: None,
)
def test_other_ways_to_write_the_same(tmp_path, caplog, place, value):
    changed(tmp_path, place, value)
    scores, _ = outcome(tmp_path, caplog)
    assert scores.ap == pytest.approx(1)


def test_ids_that_are_words_huge_or_negative(tmp_path, caplog):
    path = annotation_file(tmp_path)
    content = json.loads(path.read_text())
    names = {10: "img-a", 11: 10**25, 12: -4}
    for image in content["images"]:
        image["id"] = names[image["id"]]
    for annotation in content["annotations"]:
        annotation["image_id"] = names[annotation["image_id"]]
    path.write_text(json.dumps(content))
    scores, _ = outcome(tmp_path, caplog)
    assert scores.ap == pytest.approx(1)


def test_an_annotation_of_nothing_that_is_listed(tmp_path, caplog):
    path = annotation_file(tmp_path)
    content = json.loads(path.read_text())
    content["annotations"] += [
        dict(content["annotations"][0], image_id=99),
        dict(content["annotations"][0], category_id=5),
    ]
    path.write_text(json.dumps(content))
    scores, said = outcome(tmp_path, caplog)
    assert scores.ap == pytest.approx(1) and "2 of 5 annotations do not count" in said


def test_crowds_only_have_no_score(tmp_path, caplog):
    path = annotation_file(tmp_path)
    content = json.loads(path.read_text())
    for annotation in content["annotations"]:
        annotation["iscrowd"] = 1
    path.write_text(json.dumps(content))
    scores, said = outcome(tmp_path, caplog)
    assert scores is None and "crowds only" in said


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_encodings(tmp_path, caplog, encoding):
    path = annotation_file(tmp_path)
    path.write_bytes(path.read_text().encode(encoding))
    scores, _ = outcome(tmp_path, caplog)
    assert scores.ap == pytest.approx(1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"\x1f\x8b\x08\x00", "compressed by gzip"),
        (b'{"a": 1}\n{"a": 2}\n', "line 2: Extra data, one json object is wanted"),
        (b"[]", "one object with images, annotations and categories is wanted"),
        (b"null", "one object with"),
        (b'{"images": [', "line 1: Expecting value"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it is a Git LFS pointer, fetch the file with git lfs pull"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"images": ' + b"1" * 5000 + b"}", "digits"),
    ],
)
def test_files_that_are_no_annotations(tmp_path, data, message):
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.json is no usable COCO annotation file: .*{message}"):
        read_annotations(path)


def test_reading_leaves_the_entries_as_they_are(tmp_path):
    path = annotation_file(tmp_path)
    before = json.loads(path.read_text())
    content = read_annotations(path)
    assert content == before
    kept = copy.deepcopy(content)
    results = coco.CocoResults({"a.jpg": 10}, [1, 7], content, path)
    results.add("a.jpg", rows([10, 10, 50, 50, 0.9, 0]))
    results.score()
    assert content == kept


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3), (3.0, 3), ("3", 3), (" 3.0 ", 3), ("-3", -3), ("000123", 123), ("a 3", "a 3"), ("", None), (True, None),
     (None, None), (math.nan, None), (math.inf, None), (0.5, None), ([], None), ("1" * 30, "1" * 30)],
)  # fmt: skip
def test_ids(value, expected):
    assert as_id(value) == expected


# ---- images --------------------------------------------------------------------------------------------------------


def matched(images, *names):
    return match_images(images, [{"id": i, "file_name": name} for i, name in enumerate(names)], "file")


@pytest.mark.parametrize(
    ("images", "names", "expected"),
    [
        (["/d/a/1.jpg"], ["a/1.jpg"], {"/d/a/1.jpg": 0}),
        (["/d/a/1.jpg"], ["./a//1.jpg"], {"/d/a/1.jpg": 0}),
        (["/d/a/1.jpg"], ["../a/1.jpg"], {"/d/a/1.jpg": 0}),
        (["/d/a/1.jpg", "/d/b/1.jpg"], ["a/1.jpg"], {"/d/a/1.jpg": 0}),
        (["/d/a/1.jpg", "/d/b/1.jpg"], ["b\\1.jpg", "a\\1.jpg"], {"/d/a/1.jpg": 1, "/d/b/1.jpg": 0}),
        (["/d/a/1.jpg", "/d/b/1.jpg"], ["1.jpg", "b/1.jpg"], {"/d/a/1.jpg": 0, "/d/b/1.jpg": 1}),
        (["/d/a/1.jpg", "/d/b/1.jpg", "/d/2.jpg"], ["1.jpg", "2.jpg"], {"/d/2.jpg": 1}),
        (["/d/a/1.jpg", "/d/2.jpg"], ["a/1.jpg", "a/1.jpg", "2.jpg"], {"/d/2.jpg": 2}),
        (["/d/1.jpg", "/d/1.png"], ["1.png", "1.jpg"], {"/d/1.jpg": 1, "/d/1.png": 0}),
        (["/d/A.jpg", "/d/a.jpg"], ["a.jpg"], {"/d/a.jpg": 0}),
        (["/d/val/1.jpg", "/d/val/../val/1.jpg"], ["val/1.jpg"], {"/d/val/1.jpg": 0, "/d/val/../val/1.jpg": 0}),
        # absolute names of another machine: what they share before its last folder counts for nothing
        (["/d/val/1.jpg"], ["/home/me/val/1.jpg"], {"/d/val/1.jpg": 0}),
        (["/d/val/1.jpg"], ["C:\\me\\val\\1.jpg"], {"/d/val/1.jpg": 0}),
        (["/d/s/a/1.jpg", "/d/s/b/1.jpg"], ["/x/s/a/1.jpg", "/x/s/b/1.jpg"], {"/d/s/a/1.jpg": 0, "/d/s/b/1.jpg": 1}),
        (["/d/s/a/1.jpg", "/d/s/b/1.jpg"], ["https://h/s/b/1.jpg", "https://h/s/c/1.jpg"], {"/d/s/b/1.jpg": 0}),
    ],
)
def test_an_entry_has_one_image(images, names, expected):
    assert matched(images, *names) == expected


@pytest.mark.parametrize(
    ("images", "name"),
    [
        (["/d/clipB/00.jpg"], "clipA/00.jpg"),
        (["/d/b/frames/00.jpg"], "a/frames/00.jpg"),
        (["/d/b/00.jpg"], "/home/a/00.jpg"),
        (["/d/00.jpg"], "00.png"),
        (["/d/a00.jpg"], "00.jpg"),
    ],
)
def test_a_folder_that_contradicts(images, name):
    with pytest.raises(ValueError, match=rf"names none of the 1 images; an entry is '{name}', an image {images[0]}"):
        matched(images, name)


def test_two_images_never_take_one_entry():
    with pytest.raises(ValueError, match=r"none of the 2 images and has one entry for several of them \(2\)"):
        matched(["/d/a/1.jpg", "/d/b/1.jpg"], "1.jpg")


# ---- without annotations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        (["000123.jpg", "street.jpg"], [123, "street"]),
        (["000123.jpg", "123.jpg"], ["000123.jpg", "123.jpg"]),
        (["clipA/00.jpg", "clipB/00.jpg"], ["clipA/00", "clipB/00"]),
        (["a.jpg", "a.png", "b.jpg"], ["a.jpg", "a.png", "b.jpg"]),
        (["A.jpg", "a.jpg"], ["A", "a"]),
        (["x/v1.0.jpg", "y/v1.0.jpg"], ["x/v1.0", "y/v1.0"]),
    ],
)
def test_ids_of_images_differ(tmp_path, files, ids):
    paths = files_in(tmp_path, files)
    results = coco.open_results(data_in(tmp_path), "val", NAMES, paths)
    for path in [*paths, paths[0]]:  # an image that is listed twice counts once
        results.add(path, rows([0, 0, 1, 1, 0.5, 0]))
    assert [row["image_id"] for row in results.rows] == ids


# ---- categories ----------------------------------------------------------------------------------------------------


def test_equal_class_names_have_a_category_each(caplog):
    twins = [{"id": 4, "name": "dog"}, {"id": 2, "name": "dog"}]
    assert match_categories(["dog", "dog"], twins, "file") == [2, 4]
    with pytest.raises(ValueError, match="names that are not unique"):
        match_categories(["dog", "dog"], [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}], "file")


def test_names_that_are_numbers_and_ids_of_any_kind():
    categories = [{"id": "b", "name": 3}, {"id": 10, "name": 2.5}, {"id": "9", "name": "x"}]
    assert match_categories(["3", "x"], categories, "file") == ["b", "9"]
    assert match_categories(["one", "two", "3"], categories, "file") == ["9", 10, "b"]

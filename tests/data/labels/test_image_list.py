import os
from pathlib import Path

import pytest

from utils.data.labels.image_list import expand_paths, find_images, img2label_paths, labels_next_door


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("/d/images/train/a.jpg", "/d/labels/train/a.txt"),
        ("images/a.JPG", "labels/a.txt"),
        ("/images/x/images/y/a.jpg", "/images/x/labels/y/a.txt"),
        ("d/train/images/a.b.png", "d/train/labels/a.b.txt"),
        ("d/my_images/a.jpg.jpg", "d/my_images/a.jpg.txt"),
        ("a.png", "a.txt"),
        ("d/images.png", "d/images.txt"),
    ],
)
def test_label_paths(image, label):
    assert img2label_paths([image]) == [label]


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_folders_are_searched_and_sorted_by_code_points(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "set [1] *"
    touch(folder, "b/a10.jpg", "b/a2.JPG", "B.png", "ä.webp", "note.txt", ".hidden.jpg", ".git/a.jpg", "png", "x.dng")
    (folder / "b" / "up").symlink_to(folder)  # an endless loop
    (folder / "link").symlink_to(folder / "b")
    expected = ["B.png", "b/a10.jpg", "b/a2.JPG", "link/a10.jpg", "link/a2.JPG", "x.dng", "ä.webp"]
    assert expand_paths("set [1] *") == [f"set [1] */{name}" for name in expected]
    assert expand_paths("./set [1] */") == expand_paths(Path("set [1] *"))


def test_images_of_other_formats_are_named(tmp_path):
    touch(tmp_path, "a.jpg", "b.GIF", ".c.gif", "d.zip")
    paths, notes = find_images(tmp_path)
    assert paths == [str(tmp_path / "a.jpg")]
    assert [(note.effect, note.place) for note in notes] == [("file ignored", str(tmp_path / "b.GIF"))]


def test_folders_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    touch(tmp_path, "a.jpg", "locked/b.jpg")
    scandir = os.scandir

    def refuse(folder):
        if str(folder).endswith("locked"):
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)  # modes do not stop root
    paths, notes = find_images(tmp_path)
    assert paths == [str(tmp_path / "a.jpg")]
    assert [note[1:] for note in notes] == [("folder cannot be read (Permission denied)", str(tmp_path / "locked"))]


def test_list_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    touch(tmp_path, *(f"ds/images/{n}.jpg" for n in "01234567"), "ds/#7.jpg", "ds/images/a.txt", "here/8.jpg")
    lines = [
        "./images/0.jpg\r\n",
        "./images/1.jpg  \r\n",
        "\r\n",
        "images/2.jpg\r\n",
        "# ./images/3.jpg\r\n",
        "./../ds/images/4.jpg\n",
        ".\\images\\5.jpg\n",
        f"{tmp_path}/ds/images/6.jpg\n",
        "#7.jpg\n",
        "here/8.jpg\n",
        "./images/0.jpg\n",
        "images/a.txt\n",
        "C:\\data\\x.jpg",
    ]
    (tmp_path / "ds/train.txt").write_bytes("".join(lines).encode("utf-8-sig"))
    paths, notes = find_images("ds/train.txt")
    assert sorted(Path(path).stem for path in paths) == ["#7", "0", "1", "2", "4", "5", "6", "8"]
    assert paths == sorted(paths)
    assert "ds/images/0.jpg" in paths
    assert [note.place for note in notes] == [
        "ds/train.txt:12 images/a.txt",
        "ds/train.txt:13 C:\\data\\x.jpg",
        "ds/images/0.jpg",
    ]


@pytest.mark.parametrize("suffix", ["gif", "HEIC", "avif", "jfif", "svg", "nef", "tga"])
def test_formats_that_are_not_supported_are_called_alike(suffix, tmp_path):
    touch(tmp_path, "images/a.jpg", f"images/b.{suffix}")
    (tmp_path / "list.txt").write_text(f"images/a.jpg\nimages/b.{suffix}\nimages/c.{suffix}\n")
    (folder_note,), list_notes = find_images(tmp_path)[1], find_images(tmp_path / "list.txt")[1]
    assert folder_note.reason == list_notes[0].reason == "image suffix not supported"
    assert list_notes[0].place == f"{tmp_path}/list.txt:2 images/b.{suffix}"
    assert list_notes[1].reason.startswith("no such file")


def test_lists_of_entries(tmp_path):
    touch(tmp_path, "a/1.jpg", "b/2.jpg")
    (tmp_path / "b.txt").write_text("./b/2.jpg\n./a/1.jpg", encoding="utf-16")
    entries = [str(tmp_path / "b.txt"), tmp_path / "a"]
    assert expand_paths(entries) == [f"{tmp_path}/a/1.jpg", f"{tmp_path}/b/2.jpg"]


def test_paths_that_lead_nowhere(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        expand_paths(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="no images in .*suffixes: bmp"):
        expand_paths(tmp_path)
    touch(tmp_path / "one", "a.jpg")
    with pytest.raises(ValueError, match="a.jpg is one image; a folder of images or a list"):
        expand_paths(tmp_path / "one/a.jpg")
    kinds = {"a.gif": "one image", "v.mp4": "a video", "d.zip": "an archive", "d.yaml": "a data yaml"}
    for name, kind in kinds.items():
        touch(tmp_path / "other", name)
        with pytest.raises(ValueError, match=f"{name} is {kind}; a folder of images or a list"):
            expand_paths(tmp_path / "other" / name)
    (tmp_path / "list.txt").write_text("gone.jpg")
    with pytest.raises(ValueError, match=r"no images in .*list.txt:1 gone.jpg: no such file"):
        expand_paths(tmp_path / "list.txt")


@pytest.mark.parametrize(
    ("image", "files", "found"),
    [
        ("images/train/a.jpg", ["labels/train/a.TXT"], "labels/train/a.TXT"),
        ("images/train/a.jpg", ["labels/train/A.txt"], "labels/train/A.txt"),
        ("images/train/a.jpg", ["images/train/a.txt"], "images/train/a.txt"),
        ("images/train/a.jpg", ["images/train/a.Txt"], "images/train/a.Txt"),
        ("images/train/a.jpg", ["labels/val/a.txt"], "labels/val/a.txt"),
        ("images/train/a.jpg", ["labels/a.txt"], "labels/a.txt"),
        ("images/train/a.jpg", ["Labels/train/a.txt"], "Labels/train/a.txt"),
        ("images/train/a.jpg", ["labelTxt/train/a.txt"], "labelTxt/train/a.txt"),
        ("images/train/a.jpg", ["labelTxt/a.txt"], "labelTxt/a.txt"),
        ("images/train/a.jpg", ["train/labels/a.txt"], "train/labels/a.txt"),
        ("images/train/a.jpg", ["train/labels/a.txt", "train/images/a.jpg"], ""),
        ("images/train/a.jpg", ["train/Labels/a.txt"], "train/Labels/a.txt"),
        ("images/train/a.jpg", ["train/annotations/a.xml"], "train/annotations/a.xml"),
        ("images/train/a.jpg", ["train_labels/a.txt"], "train_labels/a.txt"),
        ("img/train/a.jpg", ["train/labels/a.txt"], "train/labels/a.txt"),
        ("images/train/a.jpg", ["other/train/labels/a.txt"], ""),  # too far away
        ("images/train/a.jpg", ["images/labels/a.txt"], "images/labels/a.txt"),
        ("images/train/a.jpg", ["images/train/labels/a.txt"], "images/train/labels/a.txt"),
        ("Images/train/a.jpg", ["labels/train/a.txt"], "labels/train/a.txt"),
        ("JPEGImages/a.jpg", ["Annotations/a.xml"], "Annotations/a.xml"),
        ("img/a.jpg", ["labels/a.txt"], "labels/a.txt"),
        ("a.jpg", ["labels/a.txt"], "labels/a.txt"),
        ("images/train/a.jpg", ["images/train/a.json"], "images/train/a.json"),
        ("images/train/a.jpg", ["labels/train/a.txt.bak", "labels/train/ab.txt"], ""),
        ("images/train/a.b.jpg", ["labels/train/a.b.TXT"], "labels/train/a.b.TXT"),
        # what belongs to another image
        ("images/train/a.jpg", ["labels/val/a.txt", "images/val/a.png"], ""),
        ("images/train/a.jpg", ["labels/a.txt", "images/a.jpg"], ""),
        ("images/train/a.jpg", ["labels/train/a.txt"], None),
        ("images/a.jpg", ["labels/a.jpg.txt"], "labels/a.jpg.txt"),
        ("images/a.jpg", ["labels/a.txt.txt"], "labels/a.txt.txt"),
        ("images/a.jpg", ["labels/a.csv"], "labels/a.csv"),
        ("train/images/a.jpg", ["labels/train/a.txt"], "labels/train/a.txt"),
    ],
)  # fmt: skip
def test_labels_next_door(image, files, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    touch(tmp_path, image, *files)
    if found is None:
        assert Path(img2label_paths([image])[0]).exists()
        return
    for place in (image, str(tmp_path / image)):
        expected = str(tmp_path / found) if place != image and found else found
        assert labels_next_door([(place, *img2label_paths([place]))]) == [expected]

"""What --source means, and what its results are called."""

import pytest

from utils.detect.names import find_items


def names(items):
    return [(item.kind, item.name) for item in items]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("a.JPG", "clip.mp4", "notes.txt", "deep/b.png", "deep/c.png", "odd[1]/d.jpg"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["."], [("image", "a"), ("video", "clip")]),
        (["deep/*.png", "clip.mp4"], [("image", "b"), ("image", "c"), ("video", "clip")]),
        (["**/*.png", "deep"], [("image", "b"), ("image", "c")]),
        (["odd[1]"], [("image", "d")]),
        (["a.JPG", "a.JPG"], [("image", "a")]),
        (["0"], [("stream", "camera_0")]),
        (["RTSP://me:secret@host:554/one", "rtsp://host/x?y=1"], [("stream", "rtsp_host_554_one"),
                                                                  ("stream", "rtsp_host_x_y_1")]),
        (["rtsp://a@host/one", "rtsp://b@host/one"], [("stream", "rtsp_host_one"), ("stream", "rtsp_host_one-2")]),
        ([f"http://host/{'x' * 300}?a", f"http://host/{'x' * 300}?b"], [("stream", f"http_host_{'x' * 90}"),
                                                                        ("stream", f"http_host_{'x' * 90}-2")]),
    ],
)  # fmt: skip
def test_items(folder, sources, expected):
    assert names(find_items(sources)) == expected


def test_a_file_that_several_paths_name_is_one(folder):
    (folder / "linked").symlink_to(folder / "deep")
    (folder / "link.png").symlink_to(folder / "deep" / "b.png")
    same = ["deep/b.png", "./deep/b.png", "deep/../deep", "linked", str(folder / "deep" / "c.png")]
    assert names(find_items(same)) == [("image", "b"), ("image", "c")]
    assert names(find_items(["deep/b.png", "link.png"])) == [("image", "b"), ("image", "link")]


def test_a_list_with_windows_paths(folder, monkeypatch):
    (folder / "windows.txt").write_text(".\\a.JPG\r\ndeep\\*.png\r\nodd[1]\\d.jpg\r\n")
    expected = [("image", name) for name in "abcd"]
    assert names(find_items(["windows.txt"])) == expected
    (folder / "lists").mkdir()
    (folder / "windows.txt").rename(folder / "lists" / "windows.txt")
    assert names(find_items(["lists/windows.txt"])) == expected, "from the working directory"
    (folder / "deep\\b.png").touch()
    (folder / "plain.txt").write_text("deep\\b.png")
    assert names(find_items(["plain.txt"])) == [("image", "deep\\b")], "a name with a backslash is one"
    (folder / "plain.txt").write_text("deep\\none.png")
    with pytest.raises(ValueError, match=r"plain.txt names deep\\none.png, which does not exist"):
        find_items(["plain.txt"])


def test_formats_that_are_not_read_are_said(folder, caplog):
    for name in ("deep/d.jp2", "deep/E.HEIC", "deep/f.webm", "deep/notes.md", "deep/raw"):
        (folder / name).touch()
    assert names(find_items(["deep"])) == [("image", "b"), ("image", "c")]
    assert [record.getMessage() for record in caplog.records] == [
        "3 files ignored: suffix not supported (deep/E.HEIC, deep/d.jp2, deep/f.webm)"
    ]
    assert len(find_items(["deep/*"])) == 2 and "deep/raw" not in caplog.text  # a name, no suffix


def test_a_folder_of_folders(folder):
    (folder / "outer").mkdir()
    (folder / "deep").rename(folder / "outer" / "deep")
    with pytest.raises(ValueError, match=r"folders in it are not searched, 'outer/\*\*' takes them too"):
        find_items(["outer"])
    assert names(find_items(["outer/**"])) == [("image", "b"), ("image", "c")]
    (folder / "outer").rename(folder / "batch[1]")
    with pytest.raises(ValueError, match=r"'batch\[\[\]1\]/\*\*' takes them too"):
        find_items(["batch[1]"])
    assert names(find_items(["batch[[]1]/**"])) == [("image", "b"), ("image", "c")]
    (folder / "hidden" / ".git").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"mkv\)$"):
        find_items(["hidden"])


def test_lists_of_streams_and_of_files(folder):
    (folder / "cameras.txt").write_text("# two\n0\n\n1\r\nrtsp://host/one\n")
    assert [item.path for item in find_items(["cameras.txt"])] == ["0", "1", "rtsp://host/one"]
    (folder / "deep" / "files.txt").write_text("b.png\na.JPG\n")
    assert [item.path for item in find_items(["deep/files.txt"])] == ["a.JPG", "deep/b.png"]
    for content, message in (
        ("", "is empty"),
        ("cameras.txt", "a list holds no lists"),
        ("a.JPG\nnone.jpg", r"--source bad\.txt names none\.jpg, which does not exist"),
        ("none/*.jpg", "which does not exist"),
    ):
        (folder / "bad.txt").write_text(content)
        with pytest.raises(ValueError, match=message):
            find_items(["bad.txt"])


def test_a_folder_that_is_called_like_a_list(folder):
    (folder / "frames.txt").mkdir()
    (folder / "frames.txt" / "a.png").touch()
    assert names(find_items(["frames.txt"])) == [("image", "a")]


@pytest.mark.parametrize("source", [
    "", " ", "²", "None", "~nobody/x.jpg", "*.nothing", "[", "a.JPG/", "a.JPG/b.png", "\t", "deep/none.png", "file://a.JPG",
    "x" * 5000, "rtsp:/x", "htp://x", "-1", "0x1", "1.5", "./0", "C:\\a.jpg",
])  # fmt: skip
def test_sources_that_do_not_exist(folder, source):
    with pytest.raises(ValueError, match="does not exist"):
        find_items([source])


def test_passwords_are_not_shown(folder):
    (item,) = find_items(["rtsp://me:secret@host:554/one"])
    assert item.label == "rtsp://host:554/one" and item.path == "rtsp://me:secret@host:554/one"


def test_a_frame_and_an_image_never_share_a_file(folder):
    (folder / "clip_7.png").touch()
    assert names(find_items(["clip_7.png", "clip.mp4"])) == [("image", "clip_7"), ("video", "clip.mp4")]

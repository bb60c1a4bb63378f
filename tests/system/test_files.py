import os
import threading
from functools import partial
from pathlib import Path

import pytest

from utils.config.data_yaml import read_yaml
from utils.data.labels.image_list import find_images
from utils.detect.names import find_items
from utils.metrics.coco_annotations import read_annotations
from utils.system import files


def test_check_file_takes_what_exists_and_keeps_the_empty_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").touch()
    assert files.check_file("a.yaml") == "a.yaml"
    assert files.check_file(tmp_path / "a.yaml", suffixes=(".yaml",)) == str(tmp_path / "a.yaml")
    assert files.check_file("") == ""


def test_check_file_finds_the_only_match_below(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x/cfg/tiny.yaml", "y/other/tiny.yaml", ".hidden/cfg/tiny.yaml"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert files.check_file("cfg/tiny.yaml") == str(tmp_path / "x/cfg/tiny.yaml")
    with pytest.raises(ValueError, match=r"several files match.*x/cfg/tiny.yaml.*y/other/tiny.yaml"):
        files.check_file("tiny.yaml")


def test_check_file_falls_back_on_the_project_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert files.check_file("data/coco.yaml") == str(files.PROJECT_ROOT / "data/coco.yaml")


def test_check_file_says_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no-such-file-anywhere.yaml does not exist"):
        files.check_file("no-such-file-anywhere.yaml")
    with pytest.raises(ValueError, match=r"best.pt: expected a file ending in .yaml or .yml"):
        files.check_file("best.pt", suffixes=(".yaml", ".yml"))
    with pytest.raises(ValueError, match="is a folder"):
        files.check_file(str(tmp_path))


def test_increment_path_counts_on_from_the_greatest(tmp_path):
    names = [files.increment_path(tmp_path / "train" / "exp").name for _ in range(3)]
    assert names == ["exp", "exp2", "exp3"]
    (tmp_path / "train/exp7").mkdir()
    (tmp_path / "train/expand9").mkdir()
    assert files.increment_path(tmp_path / "train/exp").name == "exp8"
    assert files.increment_path(tmp_path / "train/v1.2").name == "v1.2"
    assert files.increment_path(tmp_path / "train/v1.2").name == "v1.22"


def test_increment_path_exist_ok_keeps_the_folder(tmp_path):
    first = files.increment_path(tmp_path / "exp", exist_ok=True)
    (first / "file").touch()
    assert files.increment_path(tmp_path / "exp", exist_ok=True) == first
    assert (first / "file").exists()


def test_increment_path_where_no_folder_can_be(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for path, exist_ok in (("file/exp", False), ("file/exp", True), ("file", True)):
        with pytest.raises(ValueError, match=r"file.* cannot be made \(.*choose another --project"):
            files.increment_path(tmp_path / path, exist_ok)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as for a folder of somebody else
    with pytest.raises(ValueError, match="exp cannot be written to"):
        files.increment_path(tmp_path / "exp", exist_ok=True)


def test_increment_path_gives_every_run_its_own_folder(tmp_path):
    made, start = [], threading.Barrier(8)

    def run():
        start.wait()
        made.append(files.increment_path(tmp_path / "exp"))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8
    assert all(path.is_dir() for path in made)


def test_atomic_write_replaces_the_whole_file_or_nothing(tmp_path):
    target = tmp_path / "results.txt"
    with files.atomic_write(target, "w") as file:
        file.write("täglich")
    assert target.read_text(encoding="utf-8") == "täglich"

    with pytest.raises(KeyboardInterrupt), files.atomic_write(target, "w") as file:
        file.write("half")
        assert target.read_text(encoding="utf-8") == "täglich"
        raise KeyboardInterrupt
    assert target.read_text(encoding="utf-8") == "täglich"
    assert os.listdir(tmp_path) == ["results.txt"]

    with files.atomic_write(target, fsync=True) as file:
        file.write(b"\0\1")
    assert target.read_bytes() == b"\0\1"


def test_atomic_write_writes_through_a_link_with_ordinary_permissions(tmp_path):
    (tmp_path / "real").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with files.atomic_write(tmp_path / "link") as file:
        file.write(b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"x"
    (tmp_path / "plain").touch()
    assert (tmp_path / "real").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("name", ["x" * 255, "x" * 240 + ".jpg", "ü" * 127])
def test_names_as_long_as_a_file_system_takes_them(name, tmp_path):
    with files.atomic_write(tmp_path / name) as file:
        file.write(b"whole")
        (temporary,) = os.listdir(tmp_path)
    assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_bytes() == b"whole"
    (tmp_path / temporary).touch()
    files.remove_leftovers(tmp_path, name)
    assert os.listdir(tmp_path) == [name]


def test_a_name_that_is_too_long_is_the_one_that_is_named(tmp_path):
    with pytest.raises(OSError, match=f"{'x' * 256}'") as caught, files.atomic_write(tmp_path / ("x" * 256)):
        pass
    assert caught.value.filename == str(tmp_path / ("x" * 256)) and not os.listdir(tmp_path)


def test_long_names_are_cut_and_stay_different(tmp_path):
    assert [files.short_name(stem, "_1.jpg") for stem in ("a.b", "x" * 249)] == ["a.b_1.jpg", "x" * 249 + "_1.jpg"]
    stems = "ü" * 130 + "a", "ü" * 130 + "b", "x" * 250, "x" * 249 + "\udcff"
    names = [files.short_name(stem, "_1.jpg") for stem in stems]
    assert len(set(names)) == 4 and all(name.endswith("_1.jpg") for name in names)
    for name in names:
        (tmp_path / name).touch()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_read_text_knows_the_encoding(tmp_path, encoding):
    file = tmp_path / "a.txt"
    file.write_bytes("0 0.5 0.5\r\n1 2".encode(encoding))
    assert files.read_text(file) == "0 0.5 0.5\r\n1 2"
    assert files.split_lines(files.read_text(file)) == ["0 0.5 0.5", "1 2"]


def test_read_text_of_odd_bytes(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"")
    assert files.read_text(file) == ""
    file.write_bytes(b"caf\xe9.jpg")
    assert os.fsencode(files.read_text(file)) == b"caf\xe9.jpg"
    assert files.printable(files.read_text(file)) == "caf\\udce9.jpg"


def test_printable_is_one_line_of_visible_characters():
    assert files.printable(Path("ü 日/a'\\b")) == "ü 日/a'\\b"
    assert files.printable("a\nb\x1b[31m\u00a0c\u2028") == "a\\nb\\x1b[31m\\xa0c\\u2028"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "is no JSON"), (b"\x80", "is no JSON"), (b"", "is no JSON"), (b"[" * 10**5, "is no JSON"),
     (b'{"a": 1, "a": 2}', "is no JSON: 'a' stands there twice"), (None, "cannot be read: Is a directory")],
)  # fmt: skip
def test_json_that_is_none(content, message, tmp_path):
    path = tmp_path / "a.json"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=f"a.json {message}"):
        files.read_json(path)


def test_json_of_any_encoding(tmp_path):
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        (tmp_path / "a.json").write_bytes('{"ä": [1, null]}'.encode(encoding))
        assert files.read_json(tmp_path / "a.json") == {"ä": [1, None]}


def test_split_lines_ends_lines_only_where_lines_end():
    assert files.split_lines("a\rb\r\nc\n\nd\x0be\u2028f") == ["a", "b", "c", "", "d\x0be\u2028f"]


# ---- temporary files that killed processes leave --------------------------------------------------------------------


def test_leftovers_are_removed_but_not_the_files_of_living_processes(tmp_path):
    dead = tmp_path / ".last.pt.0123456789ab.tmp"
    other = tmp_path / ".best.pt.0123456789ab.tmp"
    strangers = [tmp_path / name for name in (".last.pt.tmp", "last.pt.0123456789ab.tmp", ".last.pt.xyz.tmp", "a.tmp")]
    for path in (dead, other, *strangers):
        path.write_text("half a file")
    with files.atomic_write(tmp_path / "last.pt") as file:
        file.write(b"whole")
        file.flush()
        files.remove_leftovers(tmp_path, "last.pt")
        assert not dead.exists() and other.exists()
        assert len(list(tmp_path.glob(".last.pt.????????????.tmp"))) == 1, "it is being written"
        files.remove_leftovers(tmp_path)
    assert (tmp_path / "last.pt").read_bytes() == b"whole" and not other.exists()
    assert all(path.exists() for path in strangers)
    files.remove_leftovers(tmp_path / "missing")


def test_short_names_of_what_lies_below(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert files.below(tmp_path / "runs/exp", tmp_path) == files.below("runs/../runs/exp", ".") == Path("runs/exp")
    assert files.below(tmp_path / "runs/exp", tmp_path / "runs/e") == tmp_path / "runs/exp"
    assert files.below("..", ".") == tmp_path.parent and files.below(".", ".") == Path()


def test_long_messages_are_folded():
    words = [f"--flag-{number}" for number in range(40)]
    lines = files.folded(" ".join(words), 30, indent=2).splitlines()
    assert all(len(line) <= 30 for line in lines) and all(line.startswith("  --flag") for line in lines[1:])
    assert " ".join(lines).split() == words, "flags and paths stay whole"
    assert files.folded("a/" + "b" * 120) == "a/" + "b" * 120 and files.folded("  short  one") == "  short  one"


def test_words_for_messages():
    assert [files.counted(n, "image") for n in (0, 1, 2)] == ["0 images", "1 image", "2 images"]
    assert [files.counted(n, "class", "classes") for n in (1, 80)] == ["1 class", "80 classes"]
    error = OSError(28, "No space left on device", "a/last.pt")
    assert files.cause_of(error) == "No space left on device"
    assert files.cause_of(error, with_file=True) == "a/last.pt: No space left on device"
    assert files.cause_of(KeyError()) == "KeyError" and files.cause_of(OSError("odd"), with_file=True) == "odd"


@pytest.mark.parametrize(("text", "said"), [
    ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n", "a Git LFS pointer, fetch the file"),
    ("\n <!DOCTYPE html>\n<html><title>404</title></html>", r"a web page \(HTML\), the download failed"),
])  # fmt: skip
def test_what_came_in_place_of_a_file(text, said, tmp_path):
    """Every text that a person names says so, rather than what is wrong with its first line."""
    names = {suffix: tmp_path / f"file.{suffix}" for suffix in ("yaml", "json", "txt")}
    for path in names.values():
        path.write_text(text)
    for read in (lambda: read_yaml(names["yaml"]), lambda: files.read_json(names["json"]),
                 lambda: find_images(names["txt"]), lambda: find_items([str(names["txt"])]),
                 lambda: read_annotations(names["json"])):  # fmt: skip
        with pytest.raises(ValueError, match=rf"file\.\w+ is .*{said}"):
            read()
    assert files.stand_in("train: images\n") == files.stand_in("") == ""
    assert "web page" in files.stand_in("\ufeff<html>".encode().decode("latin-1"))


def test_an_output_that_takes_the_place_of_another_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check = partial(files.check_replaceable, option="--out", suffixes=(".json",), start=b"{ours")
    for name, content in (("new", None), ("a.json", "x"), ("A.JSON", "x"), ("tmp.1", ""), ("own.txt", "{ours}")):
        if content is not None:
            Path(name).write_text(content)
        check(name)
    Path("best.pt").write_text("weights")
    Path("link.json").symlink_to("best.pt")
    Path("to_own").symlink_to("a.json")
    check("to_own")
    for name in ("best.pt", "link.json", os.devnull):
        with pytest.raises(ValueError, match=f"--out {name} is no .json file and would be lost"):
            check(name)
    with pytest.raises(ValueError, match="null is no .json file and would be lost"):
        files.check_replaceable(os.devnull, "--out", (".json", ""))
    reader, writer = os.pipe()
    with pytest.raises(ValueError, match="is no .json file"):
        check(f"/dev/fd/{writer}")
    os.close(reader), os.close(writer)
    Path("gone.json").symlink_to("away/b.json")
    with pytest.raises(ValueError, match="gone.json is a link into a folder that does not exist; make the folder"):
        check("gone.json")
    for name in ("a.json", "to_own"):
        with pytest.raises(ValueError, match=f"--out {name} is read by this command"):
            check(name, inputs=["", "missing", "a.json"])

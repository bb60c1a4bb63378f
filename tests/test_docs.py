"""The documents: links lead somewhere, commands are accepted, both languages have the same commands and tables."""

import re
import shlex
from functools import cache

import pytest

from utils.config import options
from utils.system.files import PROJECT_ROOT

PAGES = [*sorted(PROJECT_ROOT.glob("*.md")), *sorted((PROJECT_ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.name != "LICENSE.md"]
LANGUAGES = [("README.md", "README.zh-TW.md"), ("VAST_SETUP.md", "VAST_SETUP.zh-TW.md")]
PARSERS = {"train.py": options.train_parser, "test.py": options.test_parser, "detect.py": options.detect_parser,
           "export.py": options.export_parser}  # fmt: skip
LONGEST_README, FAST_COMMAND_BEFORE, MOST_PROGRESS_WORDS = 140, 45, 1800


def name_of(page):
    return str(page.relative_to(PROJECT_ROOT))


@cache
def parts(page):
    """(text without blocks of code, [block of code]) of a page; a block is fenced, or indented below an empty line."""
    text, blocks, fence, before = [], [], None, ""
    for line in page.read_text(encoding="utf-8").splitlines():
        indented = line.startswith("    ") and (not before or before.startswith("    "))
        if line.startswith("```"):
            fence = None if fence is not None else blocks.append([]) or line[3:]
        elif fence is not None or indented:
            if fence is None and not before.startswith("    "):
                blocks.append([])
            blocks[-1].append(line.removeprefix("    ") if fence is None else line)
        else:
            text.append(line)
        before = line
    return "\n".join(text), ["\n".join(block) for block in blocks]


def anchors(page):
    """Of the headings, as they are made where markdown is shown."""
    titles = re.findall(r"^#+ (.+)$", parts(page)[0], re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page):
    text = re.sub(r"`[^`\n]*`", "", parts(page)[0])
    return re.findall(r"\]\(([^)\s]+)\)", text)


def commands(page):
    """Every command line of the blocks, in one piece each, without comments."""
    for block in parts(page)[1]:
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"(^|\s)#.*$", "", line).strip()
            if line:
                yield line


def tables(page):
    """[[cells] of each row] of each table."""
    found, before = [], ""
    for line in parts(page)[0].splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                found.append([])
            found[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        before = line
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    lost = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if link.startswith(("http://", "https://")):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert not lost


def test_every_document_is_reached_from_the_readme():
    reached, ahead = set(), [PROJECT_ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached:
            reached.add(page)
            paths = (
                [link.partition("#")[0] for link in links(page) if "://" not in link] if page.suffix == ".md" else []
            )
            ahead += [(page.parent / path).resolve() for path in paths if path.endswith((".md", ".png"))]
    lost = [path for path in (PROJECT_ROOT / "docs").iterdir() if path not in reached]
    assert not [name_of(path) for path in lost + [page for page in PAGES if page not in reached]]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page):
    """`utils/loss/assigner.py`, or its end, `assigner.py`; but for what users and runs write."""
    spans = re.findall(r"`([^`\n]+)`", parts(page)[0])
    words = {word for span in spans for word in span.split() if re.fullmatch(r"[\w./]+\.(py|yaml|md)", word)}
    mine = (
        "my",
        "opt.",
        "hyp.",
        "ota.yaml",
        "space.yaml",
        "data.yaml",
        "report.md",
        "runs/",
        "coco320/",
        "birds/",
        "tools/NAME.py",
    )
    lost = [word for word in words if not any(path.endswith(f"/{word}") for path in files())]
    assert not [word for word in lost if not word.startswith(mine)]


@cache
def files():
    """Those of the project, each behind a slash."""
    folders = [PROJECT_ROOT / name for name in ("cfg", "data", "docs", "models", "tests", "tools", "utils")]
    paths = [*PROJECT_ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*"))]
    return [f"/{path.relative_to(PROJECT_ROOT)}" for path in paths]


def test_the_readme_is_short_and_fast_comes_early():
    lines = (PROJECT_ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LONGEST_README
    first = next(number for number, line in enumerate(lines, 1) if line.startswith("    ") and "--fast" in line)
    assert first < FAST_COMMAND_BEFORE
    assert len((PROJECT_ROOT / "progress.md").read_text(encoding="utf-8").split()) <= MOST_PROGRESS_WORDS


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_accepted(page):
    """By the parsers of the programs; a tool's source has each flag that is given to it."""
    for line in commands(page):
        found = re.search(r"(?:^|[\s/])((?:tools/|tests/)?\w+\.py)(?=\s|$)(.*)", line)
        if not found or "python" not in line and "torchrun" not in line or "-c " in line:
            continue
        program, rest = found.groups()
        arguments = [word for word in shlex.split(re.split(r"\s(?:>>|2>|&&|&|;|\|)", rest)[0]) if word != "..."]
        if program in PARSERS:
            PARSERS[program]().parse_args(arguments)
        else:
            check_tool(program, arguments)


def check_tool(program, arguments):
    """The options of trainings that a tool starts stand in one word of their own, behind variables perhaps."""
    sources = [PROJECT_ROOT / program, *(PROJECT_ROOT / "tools").glob("*/*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    for before, word in zip(["", *arguments], arguments, strict=False):
        if before in ("--args", "--base-args", "--a", "--b"):
            options.train_parser().parse_args([part for part in shlex.split(word) if not part.startswith("USE_")])
        elif word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in text, f"{program} has no {word}"
        if word.endswith(".yaml") and word.startswith(("cfg/", "data/")) and "birds" not in word:
            assert (PROJECT_ROOT / word).is_file(), word


@pytest.mark.parametrize(("english", "chinese"), LANGUAGES)
def test_both_languages_have_the_same_commands_and_tables(english, chinese):
    """Words are translated; commands, the shape of tables, and code and numbers in their cells are not."""
    one, other = PROJECT_ROOT / english, PROJECT_ROOT / chinese
    assert list(commands(one)) == list(commands(other))
    headings = [re.findall(r"^(#+) ", parts(page)[0], re.MULTILINE) for page in (one, other)]
    assert headings[0] == headings[1]
    pairs = list(zip(tables(one), tables(other), strict=True))
    assert pairs
    for table, same in pairs:
        for row, translated in zip(table, same, strict=True):
            assert len(row) == len(translated)
            for cell, again in zip(row, translated, strict=True):
                assert facts(cell) == facts(again), (cell, again)
    assert chinese in links(one) and english in links(other)
    assert re.search(r"[\u4e00-\u9fff]", parts(other)[0])


def facts(cell):
    """Code, files that links lead to, and numbers of a cell: in the order of each language, so they are sorted."""
    code = re.findall(r"`[^`]*`", cell)
    rest = re.sub(r"`[^`]*`", "", cell)
    targets = re.findall(r"\]\(([^)]+)\)", rest)
    return sorted(code), sorted(targets), sorted(re.findall(r"\d[\d,.]*\d|\d", re.sub(r"\]\([^)]+\)", "", rest)))


@pytest.mark.parametrize("chinese", [chinese for _, chinese in LANGUAGES])
def test_words_of_the_field_as_taiwan_says_them(chinese):
    """Words of the mainland that a translation easily slips into."""
    text = (PROJECT_ROOT / chinese).read_text(encoding="utf-8")
    elsewhere = """數據 推理 置信 服務器 緩存 內存 顯存 默認 信息 網絡 軟件 硬件 程序 代碼 視頻 文件夾 質量 優化 線程
        進程 打印 運行 支持 命令行 激活 保存 鏈接 屏幕 圖像 磁盤 硬盤 字節 接口 變量 函數 設置 卸載 批量 加載 文檔"""
    assert not [word for word in elsewhere.split() if word in text]

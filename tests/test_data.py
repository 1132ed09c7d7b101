"""The data room: what goes in, which side it goes to, and that a built file is whole or refused."""

import hashlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mhar_minimal import data
from mhar_minimal.data import batch, decode, encode, load_corpus, windows


def text_of(tokens):
    return tokens.numpy().tobytes().decode()


def paragraphs(text):
    """Line by line, independently of the regular expression in the package."""
    found, lines = [], []
    for line in [*text.split("\n"), ""]:
        if line.strip():
            lines.append(line)
        elif lines:
            found.append("\n".join(lines).strip())
            lines = []
    return found


def write(folder, texts):
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return folder


def numbered(count, start=0):
    return "\n\n".join(f"paragraph number {i:04}, of a fixed length" for i in range(start, start + count))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MHAR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    """Twenty files of equal length."""
    return write(tmp_path / "texts", {f"{i:02}.txt": numbered(10, start=10 * i) for i in range(20)})


@pytest.fixture
def python(tmp_path, monkeypatch):
    """A standard library of four modules, among what is not to be taken for one."""
    root = write(
        tmp_path / "lib",
        {
            "pydoc_data/topics.py": f"topics = {{'loops': {numbered(9)!r}, 'names': 'About names.'}}\n",
            "trap.py": '"""Importing this module ends the test."""\nraise SystemExit\n',
            "shapes/__init__.py": '"""Shapes."""\n\n'
            'class Square:\n    """A square.\n\n    It has sides.\n    """\n\n'
            '    def area(self):\n        """Its area."""\n\nasync def late():\n    """Later."""\n',
            "more.py": "\n\n".join(f'def f{i}():\n    """Function number {i}."""' for i in range(30)),
            "test/broken.py": "def (",
            "shapes/tests/broken.py": "def (",
            "site-packages/other.py": '"""Not of the library."""',
            "_sysconfigdata_of_one_machine.py": '"""Local paths."""',
            "config-of-one-machine/python-config.py": '"""Local paths."""',
            "notes.txt": "Not a module.",
        },
    )
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(root))
    return root


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Both standard corpora, built once, and the names of the modules that building them imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MHAR_CACHE", str(tmp_path_factory.mktemp("real")))
        before = set(sys.modules)
        built = {name: load_corpus(name) for name in ("prose", "code")}
        return built, set(sys.modules) - before


# The standard corpora


@pytest.mark.parametrize(("name", "least", "most"), [("prose", 1e6, 4e6), ("code", 6e6, 25e6)])
def test_standard_corpus_shares_no_paragraph(real, name, least, most):
    corpus = real[0][name]
    train, val = paragraphs(text_of(corpus.train)), paragraphs(text_of(corpus.val))
    assert len(set(train) | set(val)) == len(train) + len(val)  # no repeat within a side, none across
    size = len(corpus.train) + len(corpus.val)
    assert least < size < most
    assert 0.09 < len(corpus.val) / size < 0.15
    assert corpus.train.dtype == corpus.val.dtype == torch.uint8
    assert (corpus.name, corpus.python) == (name, ".".join(map(str, sys.version_info[:3])))
    assert corpus.python in corpus.path.name
    assert name in corpus.path.name


def test_standard_corpora_are_two_distributions(real):
    prose, code = (torch.bincount(real[0][name].train.int(), minlength=256).double() for name in ("prose", "code"))
    distance = (prose / prose.sum() - code / code.sum()).abs().sum() / 2
    assert distance > 0.1  # total variation between byte frequencies; 0.25 on Python 3.11
    assert paragraphs(text_of(real[0]["code"].train))[0] not in paragraphs(text_of(real[0]["prose"].train))


def test_building_imports_nothing(real):
    assert not {name.split(".")[0] for name in real[1]} & {"antigravity", "this", "turtledemo", "idlelib", "pydoc_data"}


def test_documents_of_the_library(python):
    documents = data.prose()
    assert documents["shapes/__init__.py"] == "Shapes.\n\nA square.\n\nIt has sides.\n\nIts area.\n\nLater."
    assert documents["trap.py"] == "Importing this module ends the test."
    modules = {"trap.py", "shapes/__init__.py", "more.py"}
    assert set(documents) == modules | {"topic loops", "topic names"}
    assert documents["topic names"] == "About names."
    code = data.code()
    assert set(code) == modules
    assert code["trap.py"] == '"""Importing this module ends the test."""\nraise SystemExit\n'


@pytest.mark.parametrize("content", [b"def (", b"\xff = 1", b"# coding: nonsense\n"], ids=["syntax", "bytes", "cookie"])
def test_broken_module_is_left_out_with_a_warning(python, content):
    (python / "broken.py").write_bytes(content)
    with pytest.warns(UserWarning, match=r"broken\.py left out"):
        assert "broken.py" not in data.code()


@pytest.mark.parametrize("name", ["prose", "code"])
def test_standard_corpus_is_built_once(python, name):
    first = load_corpus(name)
    content = first.path.read_bytes()
    first.path.unlink()
    assert load_corpus(name).path.read_bytes() == content  # the same file from the same sources
    shutil.rmtree(python)
    assert load_corpus(name).sha256 == first.sha256
    first.path.unlink()
    with pytest.raises(FileNotFoundError, match="lib"):
        load_corpus(name)


# Own text


def test_folder_is_split_by_the_hash_of_names(folder):
    corpus = load_corpus(folder)
    ranked = sorted((f"{i:02}.txt" for i in range(20)), key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    val = sorted(ranked[:2])
    train = sorted(ranked[2:])
    assert paragraphs(text_of(corpus.val)) == [p for n in val for p in paragraphs((folder / n).read_text("utf-8"))]
    assert paragraphs(text_of(corpus.train)) == [p for n in train for p in paragraphs((folder / n).read_text("utf-8"))]
    assert (corpus.train_documents, corpus.val_documents, corpus.python) == (18, 2, None)
    tokens = text_of(corpus.train).encode() + text_of(corpus.val).encode()
    assert corpus.sha256 == hashlib.sha256(tokens).hexdigest()


def test_folder_takes_subfolders_and_leaves_hidden_files(folder):
    before = load_corpus(folder)
    write(folder, {".hidden": "secret", ".git/config": "secret"})
    assert load_corpus(folder).path == before.path
    write(folder, {"deeper/still/more.md": "an open secret"})
    after = load_corpus(folder)
    assert "an open secret" in text_of(after.train) + text_of(after.val)


def test_same_text_same_hash_wherever_it_lies(folder, tmp_path, monkeypatch):
    first = load_corpus(folder)
    monkeypatch.setenv("MHAR_CACHE", str(tmp_path / "elsewhere"))
    shutil.copytree(folder, tmp_path / "copy")
    second = load_corpus(str(tmp_path / "copy"))
    assert first.path != second.path
    assert first.sha256 == second.sha256
    assert torch.equal(first.train, second.train)


def test_changed_text_is_built_again(folder):
    before = load_corpus(folder)
    write(folder, {"00.txt": "something new"})
    after = load_corpus(folder)
    assert after.sha256 != before.sha256
    assert load_corpus(before.path).sha256 == before.sha256


def test_repeats_keep_the_first_document_only(tmp_path):
    folder = write(
        tmp_path / "texts", {"b": numbered(20, 10), "a": numbered(20), "c": "  \n\t" + numbered(1) + "  \n\n"}
    )
    train, val = data.split({name: (folder / name).read_text("utf-8") for name in "abc"})
    assert sorted(map(paragraphs, train + val)) == [paragraphs(numbered(20)), paragraphs(numbered(10, 20))]


def test_text_file_is_cut_by_position(tmp_path):
    write(tmp_path, {"book.txt": numbered(300)})
    documents = data.own_text(tmp_path / "book.txt")
    runs = [paragraphs(documents[name]) for name in sorted(documents)]
    assert [p for run in runs for p in run] == paragraphs(numbered(300))
    assert len(runs) == 100
    assert {len(run) for run in runs} <= {2, 3, 4}
    corpus = load_corpus(tmp_path / "book.txt")
    train, val = paragraphs(text_of(corpus.train)), paragraphs(text_of(corpus.val))
    assert sorted(train + val) == paragraphs(numbered(300))
    assert 30 <= len(val) <= 34
    assert corpus.train_documents + corpus.val_documents == 100
    assert "book" in str(corpus)


def test_line_ends_and_byte_order_mark_do_not_matter(tmp_path):
    text = numbered(40) + "\n\n    Größe, μ and 大\n \t \nend\n"
    (tmp_path / "text").write_bytes(text.encode())
    unix = load_corpus(tmp_path / "text")
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load_corpus(tmp_path / "text").sha256 == unix.sha256
    assert "\n\n    Größe, μ and 大\n\nend\n\n" in text_of(unix.train) + text_of(unix.val)


lines = st.sampled_from(["a", "  a", "b ", "long " * 20, "", " ", "\t", "\f", "é"])
document = st.lists(lines, max_size=12).map("\n".join)


@given(st.dictionaries(st.sampled_from("uvwxyz"), document))
def test_split_loses_and_repeats_nothing(documents):
    train, val = data.split(documents)
    sides = [paragraphs("".join(side)) for side in (train, val)]
    assert not set(sides[0]) & set(sides[1])
    assert data.split(dict(reversed(documents.items()))) == (train, val)
    assert sorted(sides[0] + sides[1]) == sorted({p for text in documents.values() for p in paragraphs(text)})


# Bad input


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"0 document\(s\) leave 0 bytes to train and 0 to val"),
        (b" \n\n\t\n", r"0 document\(s\)"),
        (b"one short line", r"1 document\(s\) leave 0 bytes to train and 16 to val; accepted: at least 65"),
        (b"x" * 5000, r"1 document\(s\) leave 0 bytes to train and 5002"),
        (b"x" * 30 + b"\n\n" + b"y" * 30, "at least 65 bytes"),
        (numbered(40).encode() + b"\0", "NUL"),
        (numbered(40).encode("utf-16"), "UTF-8"),
        (numbered(40).encode() + b"\xe9", "UTF-8"),
    ],
    ids=["empty", "blank", "short", "one paragraph", "two short paragraphs", "nul", "utf-16", "latin-1"],
)
def test_bad_text_is_refused_by_name(tmp_path, cache, content, message):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"bad\.txt.*{message}"):
        load_corpus(tmp_path / "bad.txt")
    assert not cache.exists()


def test_65_bytes_a_side_are_enough_and_64_are_not(tmp_path):
    folder = write(tmp_path / "enough", {"a": "a" * 63, "b": "b" * 63})  # two line ends are added
    corpus = load_corpus(folder)
    assert {len(corpus.train), len(corpus.val)} == {65}
    write(folder, {"a": "a" * 62})
    with pytest.raises(ValueError, match="enough is too short"):
        load_corpus(folder)


def test_binary_file_in_a_folder_is_refused_by_name(folder):
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\x00")
    with pytest.raises(ValueError, match=r"image\.png is not UTF-8"):
        load_corpus(folder)


def test_what_is_not_there_is_refused_by_name(tmp_path, folder):
    for source in ("proze", tmp_path / "absent.txt"):
        with pytest.raises(FileNotFoundError, match=rf"{Path(source).name} is no file or folder; accepted: prose"):
            load_corpus(source)
    with pytest.raises(FileNotFoundError, match=r"absent\.safetensors"):
        load_corpus(tmp_path / "absent.safetensors")
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match="void is too short: 0 document"):
        load_corpus(tmp_path / "void")


def test_what_may_not_be_read_is_refused_by_name(folder, monkeypatch):
    def deny(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", deny)
        with pytest.raises(PermissionError, match=r"\.txt"):
            load_corpus(folder)
    scandir, locked = os.scandir, write(folder / "locked", {"a.txt": "a"})
    monkeypatch.setattr(os, "scandir", lambda path: (deny if Path(path) == locked else scandir)(path))
    with pytest.raises(PermissionError, match="locked"):
        load_corpus(folder)


def test_cache_that_cannot_be_written(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("MHAR_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"file cannot be written .*MHAR_CACHE"):
        load_corpus(folder)


# The built file


def test_carried_file_loads_equal(folder, tmp_path):
    built = load_corpus(folder)
    carried = load_corpus(str(shutil.copy(built.path, tmp_path / "carried.safetensors")))
    assert torch.equal(carried.train, built.train)
    assert torch.equal(carried.val, built.val)
    assert carried.path == tmp_path / "carried.safetensors"
    assert str(carried) == str(built)
    train, val = len(built.train), len(built.val)
    expected = f"texts: train {train:,} bytes in 18 documents, val {val:,} bytes in 2 documents, own text, sha256 "
    assert str(built) == expected + built.sha256[:12]


@pytest.mark.parametrize("keep", [0, 5, 100, -1], ids=["nothing", "no header", "half a header", "all but a byte"])
def test_truncated_file_is_refused(folder, keep):
    path = load_corpus(folder).path
    path.write_bytes(path.read_bytes()[:keep])
    for source in (folder, path):
        with pytest.raises(ValueError, match=rf"{path.name} is damaged.*cache may be deleted"):
            load_corpus(source)


def test_one_changed_byte_is_refused(folder):
    path = load_corpus(folder).path
    content = bytearray(path.read_bytes())
    for place in (-1, -len(load_corpus(folder).val) - 1):
        content[place] ^= 1
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"SHA-256; .*cache may be deleted"):
            load_corpus(folder)
        content[place] ^= 1


def test_other_safetensors_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    for metadata in (None, {"format": "pt"}):
        save_file({"train": torch.zeros(3)}, path, metadata)
        with pytest.raises(ValueError, match=r"model\.safetensors is no corpus"):
            load_corpus(path)


@pytest.mark.parametrize("where", ["write", "replace"])
def test_interrupted_build_leaves_nothing(folder, cache, monkeypatch, where):
    def half(path, content):
        with open(path, "wb") as file:
            file.write(content[: len(content) // 2])
        raise KeyboardInterrupt

    def stop(part, path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*((Path, "write_bytes", half) if where == "write" else (os, "replace", stop)))
        with pytest.raises(KeyboardInterrupt):
            load_corpus(folder)
    assert list(cache.iterdir()) == []
    assert load_corpus(folder).train_documents == 18
    assert len(list(cache.iterdir())) == 1


def test_two_builders_at_a_time_are_harmless(folder, cache, monkeypatch):
    replace, inner = os.replace, []

    def overtaken(part, path):  # a second build begins and ends while the first is about to name its file
        monkeypatch.setattr(os, "replace", replace)
        assert not path.exists()
        inner.append(load_corpus(folder))
        replace(part, path)

    monkeypatch.setattr(os, "replace", overtaken)
    outer = load_corpus(folder)
    assert outer.sha256 == inner[0].sha256
    assert list(cache.iterdir()) == [outer.path]


def test_cache_folder(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    monkeypatch.setenv("MHAR_CACHE", "mine")
    monkeypatch.setenv("XDG_CACHE_HOME", "xdg")
    monkeypatch.setenv("LOCALAPPDATA", "local")
    assert data.cache_folder() == Path("mine")
    monkeypatch.delenv("MHAR_CACHE")
    assert data.cache_folder() == Path("xdg/mhar_minimal")
    monkeypatch.delenv("XDG_CACHE_HOME")
    for platform, folder in (("linux", "home/.cache"), ("darwin", "home/Library/Caches"), ("win32", "local")):
        monkeypatch.setattr(sys, "platform", platform)
        assert data.cache_folder() == Path(folder) / "mhar_minimal"


# Windows of tokens


@settings(deadline=None)
@given(st.data(), st.integers(1, 40), st.integers(0, 2**40), st.integers(0, 2**40))
def test_windows_lie_in_the_text_and_targets_are_next(draws, count, seed, step):
    length = draws.draw(st.integers(1, 200))
    tokens = torch.arange(length + 1 + draws.draw(st.integers(0, 255 - length)), dtype=torch.uint8)  # value = place
    for inputs, targets in (batch(tokens, count, length, seed, step), windows(tokens, count, length)):
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (count, length)
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(length))
        assert torch.equal(targets, inputs + 1)
        assert targets.max() < len(tokens)


def test_batch_is_a_pure_function_of_its_arguments():
    tokens = torch.randint(256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    state, kept = torch.get_rng_state(), tokens.clone()
    first = batch(tokens, 4, 16, seed=0, step=0)[0]
    distinct = {first.numpy().tobytes()}
    for seed, step in [(0, 1), (1, 0), (1, 1), (11, 1), (1, 11), (2**32, 0), (0, 2**32)]:
        distinct.add(batch(tokens, 4, 16, seed, step)[0].numpy().tobytes())
    assert len(distinct) == 8
    assert torch.equal(first, batch(tokens, 4, 16, seed=0, step=0)[0])
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(tokens, kept)


def test_batch_is_the_same_on_every_machine():
    starts = batch(torch.arange(256, dtype=torch.uint8), 5, 1, seed=3, step=7)[0].flatten()
    assert starts.tolist() == [108, 36, 63, 171, 137]


def test_batch_starts_are_uniform():
    tokens = torch.arange(14, dtype=torch.uint8)
    starts = batch(tokens, 10_000, 4, seed=0, step=0)[0][:, 0]
    counts = torch.bincount(starts, minlength=10).double()
    assert len(counts) == 10  # the first byte and the last are reached
    assert ((counts - 1000).square() / 1000).sum() < 27.9  # chi-square, 9 degrees of freedom, p = 0.001


def test_windows_by_hand():
    tokens = torch.arange(11, dtype=torch.uint8)
    assert windows(tokens, 3, 4)[0].tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert windows(tokens, 1, 10)[1].tolist() == [list(range(1, 11))]


def test_windows_that_do_not_fit_are_refused():
    tokens = torch.arange(10, dtype=torch.uint8)
    for call in (lambda n, t: batch(tokens, n, t, 0, 0), lambda n, t: windows(tokens, n, t)):
        call(1, 9)
        with pytest.raises(ValueError, match="length=10 with 10 tokens"):
            call(1, 10)
        with pytest.raises(ValueError, match="length=0; accepted: at least 1"):
            call(1, 0)
        with pytest.raises(ValueError, match=r"(size|count)=0; accepted: at least 1"):
            call(0, 5)


@given(st.text())
def test_text_survives_encoding(text):
    tokens = encode(text)
    assert tokens.dtype == torch.uint8
    assert decode(tokens) == decode(tokens.long()) == text


def test_half_a_character_is_decoded_with_a_mark():
    assert decode(encode("aé")[:2]) == "a�"

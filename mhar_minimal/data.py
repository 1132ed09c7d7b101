"""Text to train on that every machine already has, as bytes; or your own.

``prose`` is the documentation topics that CPython ships (``pydoc_data.topics``) and the docstrings of its standard
library; ``code`` is the standard library's sources. Both change with the Python version, so a corpus says which one it
was built from and carries the SHA-256 of its tokens. Sources are parsed, never imported.
"""

import ast
import hashlib
import json
import os
import platform
import re
import sys
import sysconfig
import tokenize
import uuid
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

FORMAT = "mhar_minimal corpus 1"  # the metadata entry of a built file; the number changes with the rules below
WINDOW = 65  # bytes that train and val must each hold: one window of the tiny preset and its last target
PASSAGES = 100  # documents that a single text file is cut into, at most
BLANK = re.compile(r"\n\s*\n")  # what separates paragraphs

# Not the library: its tests (where CPython keeps the files that are broken on purpose) and what others installed.
FOREIGN = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
GENERATED = ("config-", "_sysconfigdata")  # written by the build of one machine, with its paths


@dataclass(frozen=True, eq=False)
class Corpus:
    """Byte tokens (vocabulary 256) in two splits that share no document and no paragraph."""

    name: str
    train: Tensor  # uint8 [n]
    val: Tensor  # uint8 [m]
    train_documents: int
    val_documents: int
    python: str | None  # version it was built from; None for a reader's own text
    path: Path  # the built file
    sha256: str  # of the train bytes, then the val bytes

    def __str__(self) -> str:
        return (
            f"{self.name}: train {len(self.train):,} bytes in {self.train_documents} documents, "
            f"val {len(self.val):,} bytes in {self.val_documents} documents, "
            f"{f'Python {self.python}' if self.python else 'own text'}, sha256 {self.sha256[:12]}"
        )


def load_corpus(source: str | Path = "prose") -> Corpus:
    """The corpus of that name or path, built into the cache folder on first use (about 5 s) and verified on every load.

    A document is a topic, a module's docstrings, a source file or a file of a folder. A single text file is cut into
    up to 100 passages by position, and each passage is a document. Own text is UTF-8, whatever its suffix; of a folder
    every file counts, those in its subfolders too, except hidden ones (links to folders are not followed).

    Documents are taken in the order of their names. A paragraph (text between blank lines, compared without the white
    space around it) that occurred before is dropped. Then, in the order of the SHA-256 of their names, documents go to
    validation until it holds a tenth of the text.

    Args:
        source: ``"prose"``, ``"code"``, a built file (``*.safetensors``), a text file, or a folder of text files.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: text that is not UTF-8 or has NUL bytes, or that leaves train or validation below 65 bytes; a built
            file that is damaged or is no corpus. The message names the file.
        OSError: a file that cannot be read, or a cache folder that cannot be written.
    """
    if source in ("prose", "code"):
        python = platform.python_version()
        path = cache_folder() / f"{source}-{python}.safetensors"
        if not os.path.exists(path):
            build(path, source, prose() if source == "prose" else code(), python, sysconfig.get_path("stdlib"))
        return read(path)
    given = Path(source)
    if given.suffix == ".safetensors":
        return read(given)
    documents = own_text(given)
    content = "\0".join(f"{name}\0{documents[name]}" for name in sorted(documents))
    name = given.resolve().stem
    path = cache_folder() / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}.safetensors"
    if not os.path.exists(path):
        build(path, name, documents, None, given)
    return read(path)


def batch(tokens: Tensor, size: int, length: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Windows at uniformly drawn places: inputs and targets (the next bytes), int64 [size, length] each.

    A pure function of its arguments: a run can resume at any step, and runs that share a seed see the same batches.

    Raises:
        ValueError: fewer than ``length + 1`` tokens, or a size or length below 1.
    """
    check_windows(tokens, length, size=size)
    # Hashed, because PyTorch's CPU generator keeps 32 bits of its seed and (seed, step) must not collide by design.
    draw = int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:8], "big")
    starts = torch.randint(len(tokens) - length, (size,), generator=torch.Generator().manual_seed(draw))
    return cut(tokens, starts, length)


def windows(tokens: Tensor, count: int, length: int) -> tuple[Tensor, Tensor]:
    """The fixed validation set: ``count`` evenly spaced windows, first and last byte included; as `batch` returns them.

    They overlap where ``count * length`` exceeds the tokens.

    Raises:
        ValueError: fewer than ``length + 1`` tokens, or a count or length below 1.
    """
    check_windows(tokens, length, count=count)
    starts = torch.arange(count) * (len(tokens) - length - 1) // max(count - 1, 1)
    return cut(tokens, starts, length)


def encode(text: str) -> Tensor:
    """UTF-8 bytes of a text, uint8 [n]."""
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())


def decode(tokens: Tensor) -> str:
    """The text of byte tokens [n] of any integer dtype; what is not UTF-8, such as half a character, becomes U+FFFD."""
    return bytes(tokens.tolist()).decode(errors="replace")


def cut(tokens: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    text = tokens[starts[:, None] + torch.arange(length + 1)].long()  # [size, length + 1]
    return text[:, :-1], text[:, 1:]


def check_windows(tokens: Tensor, length: int, **number: int) -> None:
    for name, value in {"length": length, **number}.items():
        if value < 1:
            raise ValueError(f"{name}={value}; accepted: at least 1")
    if len(tokens) <= length:
        raise ValueError(f"length={length} with {len(tokens)} tokens; accepted: up to one less than the tokens")


def cache_folder() -> Path:
    """Where built corpora lie: MHAR_CACHE, or mhar_minimal in XDG_CACHE_HOME or in the platform's cache folder."""
    if folder := os.environ.get("MHAR_CACHE"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "mhar_minimal"
    if sys.platform == "win32" and (folder := os.environ.get("LOCALAPPDATA")):
        return Path(folder) / "mhar_minimal"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "mhar_minimal"


def files(folder: Path, left_out: Collection[str] = ()) -> Iterator[tuple[str, Path]]:
    """Name (relative, with forward slashes) and path of every file below a folder that is not hidden or left out."""

    def stop(error: OSError) -> None:  # os.walk would pass over a folder that it cannot read
        raise error

    for here, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                path = Path(here, name)
                yield path.relative_to(folder).as_posix(), path


def library() -> Iterator[tuple[str, str, ast.Module]]:
    """Name, source and syntax tree of the standard library's modules, tests left out.

    A file that does not decode or parse is left out with a warning; CPython has none outside its tests.
    """
    for name, path in files(Path(sysconfig.get_path("stdlib")), FOREIGN):
        if path.suffix != ".py" or name.startswith(GENERATED):
            continue
        try:
            with tokenize.open(path) as file:
                source = file.read()
            yield name, source, ast.parse(source)
        except (SyntaxError, UnicodeDecodeError) as error:
            warnings.warn(f"{path} left out of the corpus: {error}", stacklevel=2)


def prose() -> dict[str, str]:
    documents = {}
    for name, _, tree in library():
        if name == "pydoc_data/topics.py":
            topics = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
            documents |= {f"topic {topic}": text for topic, text in topics.items()}
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        nodes.sort(key=lambda node: getattr(node, "lineno", 0))  # reading order
        documents[name] = "\n\n".join(filter(None, map(ast.get_docstring, nodes)))
    return documents


def code() -> dict[str, str]:
    # The topics are a Python file, but they are prose.
    return {name: source for name, source, _ in library() if name != "pydoc_data/topics.py"}


def own_text(path: Path) -> dict[str, str]:
    if path.is_dir():
        return {name: read_text(file) for name, file in files(path)}
    paragraphs, documents, start = BLANK.split(read_text(path)), defaultdict(str), 0
    end = sum(map(len, paragraphs)) + 1
    for paragraph in paragraphs:
        documents[f"passage {PASSAGES * start // end:02}"] += paragraph + "\n\n"
        start += len(paragraph)
    return documents


def read_text(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is no file or folder; accepted: prose, code, a built *.safetensors, a text file, a folder of them"
        )
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}); accepted: UTF-8 text") from error
    if "\0" in text:
        raise ValueError(f"{path} has NUL bytes, so it is binary; accepted: UTF-8 text")
    return text


def split(documents: dict[str, str]) -> tuple[list[str], list[str]]:
    """The documents of train and of val, repeated paragraphs dropped; the rule is in `load_corpus`."""
    seen, kept = set(), {}
    for name in sorted(documents):
        paragraphs = []
        for paragraph in BLANK.split(documents[name]):
            if (key := paragraph.strip()) and key not in seen:
                seen.add(key)
                paragraphs.append(paragraph.strip("\n") + "\n\n")
        if paragraphs:
            kept[name] = "".join(paragraphs)
    wanted = max(sum(map(len, kept.values())) / 10, WINDOW)
    val, held = set(), 0
    for name in sorted(kept, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if held >= wanted:
            break
        val.add(name)
        held += len(kept[name])
    return [kept[name] for name in kept if name not in val], [kept[name] for name in kept if name in val]


def build(path: Path, name: str, documents: dict[str, str], python: str | None, origin: str | Path) -> None:
    train, val = split(documents)
    tokens = {"train": encode("".join(train)), "val": encode("".join(val))}
    if min(map(len, tokens.values())) < WINDOW:
        raise ValueError(
            f"{origin} is too short: {len(train) + len(val)} document(s) leave {len(tokens['train'])} bytes to train "
            f"and {len(tokens['val'])} to val; accepted: at least {WINDOW} bytes in each, so at least two files in a "
            f"folder, or two paragraphs, with a blank line between, in a text file"
        )
    about = {
        "name": name,
        "python": python,
        "train_documents": len(train),
        "val_documents": len(val),
        "sha256": sha256(tokens["train"], tokens["val"]),
    }
    # Complete before it has its name: a build that is interrupted, or runs twice at a time, leaves no half file.
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(save(tokens, {FORMAT: json.dumps(about)}))  # one entry: the order of several is random
        os.replace(part, path)
    except OSError as error:
        raise OSError(
            f"cache folder {path.parent} cannot be written ({error}); set MHAR_CACHE to one that can"
        ) from error
    finally:
        with suppress(OSError):  # nothing to remove after a replace, or in a folder that does not let us in
            part.unlink()


def read(path: Path) -> Corpus:
    remedy = f"accepted: a file that load_corpus built; one in {cache_folder()} may be deleted and is then built again"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; accepted: a file that load_corpus built")
    try:
        with safe_open(path, "pt") as file:
            about = (file.metadata() or {}).get(FORMAT)
            if about is None:
                raise ValueError(f"{path} is no corpus: its metadata have no {FORMAT!r}; {remedy}")
            train, val = file.get_tensor("train").clone(), file.get_tensor("val").clone()  # the file may go away
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no corpus ({error}); {remedy}") from error
    corpus = Corpus(train=train, val=val, path=path, **json.loads(about))
    if sha256(train, val) != corpus.sha256:
        raise ValueError(f"{path} is damaged: its tokens do not have the recorded SHA-256; {remedy}")
    return corpus


def sha256(train: Tensor, val: Tensor) -> str:
    digest = hashlib.sha256(train.numpy())
    digest.update(val.numpy())
    return digest.hexdigest()

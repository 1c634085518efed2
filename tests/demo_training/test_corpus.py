"""Text collection: the fallback without downloads, the R format, the split, and errors that name a way out."""

import struct
import zlib

import pytest

from runtime.demo_training import corpus as corpus_module
from runtime.demo_training.corpus import CORPORA, HELD_OUT_MODULES, load_corpus
from runtime.demo_training.novels import read_novels
from trace_capture.errors import StudioError


def _xdr_strings(strings, version=2):
    header = b"X\n" + struct.pack(">iii", version, 0, 0)
    if version == 3:
        header += struct.pack(">i", 5) + b"UTF-8"
    body = b"".join(struct.pack(">ii", 9, len(text.encode())) + text.encode() for text in strings)
    return header + struct.pack(">ii", 16, len(strings)) + body


def _record(serialised):
    return struct.pack(">I", len(serialised)) + zlib.compress(serialised)


@pytest.fixture(scope="module")
def stdlib_corpus(tmp_path_factory):
    return load_corpus("stdlib", tmp_path_factory.mktemp("unused"))


def test_stdlib_corpus_needs_no_download_and_holds_modules_out(stdlib_corpus):
    assert list(stdlib_corpus.train) == ["code"]
    assert stdlib_corpus.num_characters("code") > 3_000_000
    assert len(stdlib_corpus.held_out["code"]) >= len(HELD_OUT_MODULES) - 2
    assert not set(stdlib_corpus.held_out["code"]) & set(stdlib_corpus.train["code"])
    (source,) = stdlib_corpus.sources
    assert source.digest.startswith("sha256:")
    assert source.licence == "PSF-2.0"


def test_held_out_text_is_absent_from_training_text(stdlib_corpus):
    line = "class TextWrapper:"
    assert any(line in text for text in stdlib_corpus.held_out["code"])
    assert not any(line in text for text in stdlib_corpus.train["code"])


@pytest.mark.parametrize("version", [2, 3])
def test_novels_are_read_from_the_r_format(tmp_path, version):
    lines = [f"line {number}, café" for number in range(1200)]
    noise = _record(
        b"X\n"
        + struct.pack(">iii", version, 0, 0)
        + (struct.pack(">i", 0) if version == 3 else b"")
        + struct.pack(">ii", 13, 0)
    )
    path = tmp_path / "novels.rdb"
    path.write_bytes(noise + _record(_xdr_strings(["short"], version)) + _record(_xdr_strings(lines, version)))
    assert read_novels(path) == ["\n".join(lines) + "\n"]


def test_file_without_novels_is_refused(tmp_path):
    path = tmp_path / "other.rdb"
    path.write_bytes(b"\0\0\0\5not zlib at all")
    with pytest.raises(StudioError, match="holds no novels"):
        read_novels(path)


def test_split_tail_cuts_at_a_line():
    text = "".join(f"line {number}\n" for number in range(1000))
    (train,), (held_out,) = corpus_module._split_tail([text])
    assert train + held_out == text
    assert train.endswith("\n")
    assert 0.02 < len(held_out) / len(text) < 0.06


def test_unknown_corpus_names_the_choices(tmp_path):
    with pytest.raises(StudioError, match=f"choose one of {', '.join(CORPORA)}"):
        load_corpus("bible", tmp_path)


def test_machine_without_apt_is_told_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StudioError, match="--corpus stdlib"):
        load_corpus("full", tmp_path)


def test_packages_already_in_the_cache_are_not_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in corpus_module.DEBIAN_PACKAGES:
        (tmp_path / f"{name}_1.0-1_all.deb").touch()
        (tmp_path / name).mkdir()
    found = corpus_module.fetch_packages(tmp_path)
    assert set(found) == set(corpus_module.DEBIAN_PACKAGES)
    assert corpus_module._package_source("docs", found["python3.11-doc"][0], "PSF").version == "1.0-1"

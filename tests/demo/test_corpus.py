"""The corpus of the demonstration: packing, offsets and positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tilefold.demo.corpus import BORDER, LARGEST, Corpus

CPU = torch.device("cpu")


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    for index in range(9):
        (tmp_path / f"{index}.py").write_text(str(index) * (10 + index))
    (tmp_path / "large.py").write_text("x" * (LARGEST + 1))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "left_out.py").write_text("left out")
    (tmp_path / "binary.py").write_bytes(b"nul \0 byte")
    (tmp_path / "empty.py").write_text("")
    return Corpus.load(tmp_path)


def test_every_file_stands_behind_its_border(corpus: Corpus) -> None:
    pieces = bytes(corpus.stream.tolist()).split(BORDER)
    assert pieces[0] == pieces[-1] == b""
    assert sorted(pieces[1:-1]) == [str(index).encode() * (10 + index) for index in range(9)]
    assert corpus.files == 9


def test_windows_tile_the_stream(corpus: Corpus) -> None:
    count = corpus.windows(32)
    windows = [corpus.window(index, 32, CPU) for index in range(count)]
    tokens = torch.cat([window.tokens[0] for window in windows])
    targets = torch.cat([window.targets[0] for window in windows])
    assert torch.equal(tokens, corpus.stream[: 32 * count].long())
    assert torch.equal(targets, corpus.stream[1 : 32 * count + 1].long())
    assert torch.equal(corpus.window(count, 32, CPU).tokens, windows[0].tokens)


def test_documents_begin_at_borders(corpus: Corpus) -> None:
    several = 0
    for index in range(corpus.windows(32)):
        window = corpus.window(index, 32, CPU)
        starts = {0, *(torch.nonzero(window.tokens[0] == BORDER[0])[:, 0].tolist())}
        assert window.offsets.dtype == torch.int32
        assert window.offsets.tolist() == [*sorted(starts), 32]
        expected = [position - max(start for start in starts if start <= position) for position in range(32)]
        assert window.positions.tolist() == expected
        several += len(starts) > 2
        visible = window.mask.materialize(1, 1, 32, 32)[0, 0]
        document = torch.bucketize(torch.arange(32), window.offsets, right=True)
        assert torch.equal(visible, (document[:, None] == document) & torch.ones(32, 32).tril().bool())
    assert several > 0


def test_this_interpreter_has_a_corpus() -> None:
    corpus = Corpus.load()
    assert corpus.files > 50
    assert corpus.windows(4096) > 50


def test_an_interpreter_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"no Python source file of at most {LARGEST} bytes below"):
        Corpus.load(tmp_path)


def test_a_context_longer_than_the_corpus_is_refused(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="context: expected fewer than the"):
        corpus.windows(len(corpus.stream))

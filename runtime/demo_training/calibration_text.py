"""Write a sample of the demo model's training text, from which its default vectors are measured.

python -m runtime.demo_training.calibration_text OUT [--corpus full|stdlib] [--cache DIR]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from runtime.demo_training.corpus import CORPORA, Corpus, load_corpus
from trace_capture.files import write_text_atomic

PIECE_CHARACTERS = 900
PIECES_PER_DOMAIN = 40


def calibration_text(corpus: Corpus) -> str:
    """Pieces of training text, evenly spread over each domain, separated by a form feed."""
    pieces: list[str] = []
    for texts in corpus.train.values():
        whole = "\n".join(texts).replace("\f", " ")
        step = max(PIECE_CHARACTERS, len(whole) // PIECES_PER_DOMAIN)
        starts = range(0, max(1, len(whole) - PIECE_CHARACTERS), step)
        pieces += [whole[start : start + PIECE_CHARACTERS] for start in starts][:PIECES_PER_DOMAIN]
    return "\f".join(pieces)


def main() -> None:
    """Collect the corpus and write the sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--corpus", choices=sorted(CORPORA), default="full")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "moe-studio-corpus")
    options = parser.parse_args()
    write_text_atomic(options.out, calibration_text(load_corpus(options.corpus, options.cache)))


if __name__ == "__main__":
    main()

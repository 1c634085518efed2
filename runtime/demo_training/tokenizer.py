"""Train the byte-level BPE tokenizer and turn texts into token streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from runtime.demo_training.settings import VOCABULARY_SIZE

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"


def train_tokenizer(texts: Iterable[str], *, vocabulary_size: int = VOCABULARY_SIZE) -> Tokenizer:
    """A byte-level BPE learnt from `texts`: any string encodes, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def as_pretrained(tokenizer: Tokenizer, *, max_positions: int) -> PreTrainedTokenizerFast:
    """The tokenizer in the form that `AutoTokenizer` loads."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer saved in a model folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def token_stream(tokenizer: Tokenizer, texts: Sequence[str]) -> npt.NDArray[np.uint16]:
    """All texts as one array of token ids [T], each text ended by the end-of-text token."""
    end = cast(int, tokenizer.token_to_id(END_OF_TEXT))
    pieces: list[npt.NDArray[np.uint16]] = []
    for encoding in tokenizer.encode_batch(list(texts)):
        pieces.append(np.asarray([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(pieces)

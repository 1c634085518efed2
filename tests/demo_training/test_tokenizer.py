"""The tokenizer loses nothing and always learns the same pieces."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from runtime.demo_training.tokenizer import END_OF_TEXT, as_pretrained, load_tokenizer, token_stream, train_tokenizer

TEXTS = ["def area(width, height):\n    return width * height\n" * 20, "It was a truth, not universally known.\n" * 20]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocabulary_size=400)


@pytest.mark.parametrize(
    "text", ["return width", "  two  spaces\n\ttab", "naïve café 漢字 🙂", "a\r\nb\0c", " .. note::"]
)
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_training_is_reproducible(tokenizer):
    assert train_tokenizer(TEXTS, vocabulary_size=400).to_str() == tokenizer.to_str()


def test_stream_ends_each_text(tokenizer):
    stream = token_stream(tokenizer, ["one", "two"])
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert stream.dtype == np.uint16
    assert np.count_nonzero(stream == end) == 2
    assert stream[-1] == end


def test_saved_tokenizer_loads_by_itself_and_by_auto_class(tokenizer, tmp_path):
    as_pretrained(tokenizer, max_positions=64).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("return  width\n").input_ids == tokenizer.encode("return  width\n").ids
    assert loaded.decode(loaded("a , b .").input_ids) == "a , b ."
    assert loaded.eos_token == END_OF_TEXT
    assert load_tokenizer(tmp_path).to_str() == tokenizer.to_str()

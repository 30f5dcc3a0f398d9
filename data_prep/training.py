"""Training a SentencePiece model under which every text round-trips exactly."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data_prep.durable import sha256_of_file, write_atomic
from data_prep.errors import DataError

# A line with the line breaks before it, so that runs of blank lines can become pieces, in parts short enough
# for the trainer's quadratic steps.
_SENTENCE = re.compile(r"\n+[^\n]{0,2000}|[^\n]{1,2000}")
_TABS = ["\t", "\t\t", "\t\t\t", "\t\t\t\t"]  # the trainer never merges tabs: they are given as pieces
_META_SPACE = "\u2581"
MIN_VOCAB_SIZE = 3 + 256 + len(_TABS) + 1  # special tokens, bytes, tabs


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        # The trainer drops a sentence that holds NUL; U+2581 would be learned as a space.
        yield from _SENTENCE.findall(text.replace("\0", "").replace(_META_SPACE, ""))


def train_sentencepiece(texts: Iterable[str], vocab_size: int, model_type: str) -> bytes:
    """Trains a model and returns its file content; the same texts give the same bytes.

    Identity normalisation, byte fallback, no dummy prefix, white space kept, digits split.

    Args:
        texts: documents.
        vocab_size: pieces, with `<unk>`, `<s>`, `</s>`, 256 bytes and four tab runs among them.
        model_type: "bpe" or "unigram".

    Raises:
        DataError: no text, or more pieces asked for than the text can give.
    """
    import sentencepiece

    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(f"--vocab-size {vocab_size}: at least {MIN_VOCAB_SIZE} (256 bytes and special tokens)")
    count = 0

    def counted() -> Iterator[str]:
        nonlocal count
        for sentence in _sentences(texts):
            count += 1
            yield sentence

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=counted(),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            normalization_rule_name="identity",
            byte_fallback=True,
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            user_defined_symbols=_TABS,
            max_sentence_length=1 << 24,
            input_sentence_size=0,
            shuffle_input_sentence=False,
            character_coverage=0.9995,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        if count == 0:
            raise DataError("the corpus holds no text to train a tokenizer on") from error
        reason = " ".join(str(error).split())
        raise DataError(f"--vocab-size {vocab_size} cannot be trained on this corpus: {reason}") from error
    return model.getvalue()


def settings_path(model_path: Path) -> Path:
    """The file beside a trained model that says what it was trained with."""
    return model_path.with_suffix(".train.json")


def save_trained(model_path: Path, model: bytes, settings: dict[str, Any]) -> None:
    """Writes the settings, then the model, whose presence marks the pair as finished."""
    model_path.parent.mkdir(parents=True, exist_ok=True)
    record = {**settings, "model_sha256": hashlib.sha256(model).hexdigest()}
    write_atomic(settings_path(model_path), (json.dumps(record, indent=1) + "\n").encode())
    write_atomic(model_path, model)


def is_finished(model_path: Path, settings: dict[str, Any]) -> bool:
    """Whether `model_path` was trained with these settings.

    Raises:
        DataError: a file of that name exists and was not.
    """
    record_path = settings_path(model_path)
    if not model_path.exists():
        return False
    try:
        record = json.loads(record_path.read_bytes())
    except (OSError, ValueError):
        raise DataError(
            f"{model_path}: exists, and {record_path.name} does not say how it was made; give another --out"
        ) from None
    for key, wanted in settings.items():
        if record.get(key) != wanted:
            raise DataError(
                f"{model_path}: trained with {key} = {record.get(key)!r}, now {wanted!r}; give another --out"
            )
    if record.get("model_sha256") != sha256_of_file(model_path):
        raise DataError(f"{model_path}: its content differs from what {record_path.name} records; remove both")
    return True

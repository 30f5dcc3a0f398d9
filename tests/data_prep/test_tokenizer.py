"""Every kind of tokenizer against arbitrary Unicode."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiktoken._educational import bpe_train
from tiktoken.load import load_tiktoken_bpe
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_prep import tokenizer_gigatoken
from data_prep.errors import DataError
from data_prep.segments import segments
from data_prep.sources.stdlib import stdlib_files, stdlib_root
from data_prep.tokenizer import Tokenizer, TokenizerSpec, load_spec, load_tokenizer
from data_prep.tokenizer_tiktoken import ENCODINGS
from data_prep.training import train_sentencepiece
from tests.support.memory import resident_bytes
from tests.support.texts import SAMPLE_TEXTS

TRICKY_TEXTS = [
    "",
    " ",
    "   leading and trailing   ",
    "\t\ttabs\tand\n\n\nnewlines\r\n",
    "\0 NUL \0",
    "\u2581 the meta space \u2581\u2581",
    "1234567890",
    "e\u0301 \u00e9 \ufb01 \u2126",  # what NFKC would change
    "\u2047 \U0001f600 \U0010ffff \ufeff \u200b",
    "</s> <s> <unk> <0x0A> <|endoftext|> <|im_start|>",
    "<|endoftext|>",
]
KINDS = ["bpe", "unigram", "huggingface", "gpt2", "cl100k_base", "o200k_base", "gigatoken"]


def write_tokenizer_json(path: Path) -> Path:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE_TEXTS, trainer)
    tokenizer.enable_truncation(4)  # as some published files have it; it must not cut documents
    tokenizer.save(str(path))
    return path


def write_ranks(path: Path) -> Path:
    pattern = ENCODINGS["gpt2"].pattern
    ranks = bpe_train("".join(SAMPLE_TEXTS[:4]), 300, pattern, visualise=None)
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()]
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture(scope="module")
def tokenizers_by_kind(tmp_path_factory: pytest.TempPathFactory, model_file: Path) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("kinds")
    unigram = folder / "unigram.model"
    unigram.write_bytes(train_sentencepiece(SAMPLE_TEXTS, 335, "unigram"))
    json_file = write_tokenizer_json(folder / "tokenizer.json")
    specs = {
        "bpe": TokenizerSpec(model_file),
        "unigram": TokenizerSpec(unigram),
        "huggingface": TokenizerSpec(json_file),
        **{name: TokenizerSpec(write_ranks(folder / f"{name}.tiktoken")) for name in KINDS[3:6]},
    }
    loaded = {kind: load_spec(spec) for kind, spec in specs.items()}
    loaded["gigatoken"] = load_spec(TokenizerSpec(json_file, backend="gigatoken"))
    return loaded


@pytest.fixture(params=KINDS)
def any_tokenizer(request: pytest.FixtureRequest, tokenizers_by_kind: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_kind[request.param]


@pytest.mark.parametrize("text", TRICKY_TEXTS)
def test_tricky_text_comes_back_exactly(any_tokenizer: Tokenizer, text: str) -> None:
    ids = any_tokenizer.encode(text)
    assert any_tokenizer.decode(ids) == text
    assert any_tokenizer.eos_id not in ids


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text() | st.text(alphabet="\u2581 \t\n\0<s/>a1|endoftext"))
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)  # a busy machine is no fault of ours
def test_any_text_comes_back_exactly(kind: str, text: str, tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text)
    assert [found.tolist() for found in tokenizer.encode_batch([text, "x", text])[::2]] == [ids, ids]
    assert tokenizer.encode_batch([text])[0].tolist() == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids
    assert all(0 <= id_ < tokenizer.vocab_size for id_ in ids)


def test_the_embedded_corpus_comes_back_exactly(tokenizer: Tokenizer) -> None:
    """Every tenth source file of the running Python, whatever it holds."""
    root = stdlib_root()
    texts = [path.read_bytes().decode(errors="ignore") for path in stdlib_files(root)[::10]]
    assert sum(map(len, texts)) > 500_000
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(parts=st.lists(st.sampled_from([*SAMPLE_TEXTS[:4], "don't; ", "\n\n\n", "   x", " y"]), max_size=120))
@settings(
    deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow]
)  # a busy machine is no fault of ours
def test_segments_encode_to_what_the_whole_encodes_to(
    tokenizers_by_kind: dict[str, Tokenizer], parts: list[str]
) -> None:
    text = "".join(parts * 4)
    for kind in KINDS:
        tokenizer = tokenizers_by_kind[kind]
        joined = [id_ for part in segments(text) for id_ in tokenizer.encode(part)]
        assert joined == tokenizer.encode(text), kind


def test_pieces_that_code_needs(tokenizer: Tokenizer) -> None:
    for run in ("    ", "\t\t", "\n\n"):
        assert len(tokenizer.encode(run)) == 1
    assert len(tokenizer.encode("123")) == 3


def test_training_is_deterministic(model_file: Path) -> None:
    assert train_sentencepiece(SAMPLE_TEXTS, 440, "bpe") == model_file.read_bytes()


def test_trained_model_keeps_long_lines() -> None:
    texts = ["zebra quilt " * 2000, *SAMPLE_TEXTS]
    vocabulary = train_sentencepiece(texts, 380, "bpe")
    assert b"quilt" in vocabulary


def test_same_ids_as_the_libraries(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    text = "".join(SAMPLE_TEXTS[:8])
    gpt2 = tokenizers_by_kind["gpt2"]
    reference = tiktoken.Encoding(
        "test",
        pat_str=ENCODINGS["gpt2"].pattern,
        mergeable_ranks=load_tiktoken_bpe(str(gpt2.file)),
        special_tokens={},
    )
    assert gpt2.encode(text) == reference.encode(text)
    huggingface = tokenizers_by_kind["huggingface"]
    library = tokenizers.Tokenizer.from_file(str(huggingface.file))
    library.no_truncation()
    assert huggingface.encode(text) == library.encode(text).ids


def test_tiktoken_specials_have_their_published_ids() -> None:
    eos = {name: encoding.eos_id for name, encoding in ENCODINGS.items()}
    assert eos["gpt2"] == 50_256
    assert eos["cl100k_base"] == 100_257
    assert eos["o200k_base"] == 199_999


def test_errors_name_the_file(tmp_path: Path, model_file: Path) -> None:
    def refused(path: Path, match: str, content: bytes | None = None, **options: str) -> None:
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=match):
            load_spec(TokenizerSpec(path, **options))

    refused(tmp_path / "absent.model", "no such tokenizer file")
    refused(tmp_path / "bad.model", r"bad\.model: not a SentencePiece model", b"not a model")
    refused(tmp_path / "a.zip", "unknown kind", b"")
    refused(tmp_path / "bad.json", r"bad\.json: not a tokenizer\.json", b"{}")
    refused(tmp_path / "gpt2.tiktoken", r"gpt2\.tiktoken: line 1 is not", b"what\n")
    ranks = write_ranks(tmp_path / "own.tiktoken")
    refused(ranks, "give --tiktoken-encoding")
    assert load_spec(TokenizerSpec(ranks, encoding="gpt2")).eos_id == 300
    json_file = write_tokenizer_json(tmp_path / "tokenizer.json")
    refused(json_file, "--eos </s>: not a token of", eos="</s>")
    assert load_spec(TokenizerSpec(json_file, eos="<|im_start|>")).eos_id == 1
    content = json.loads(json_file.read_bytes())
    content["model"]["dropout"] = 0.1
    refused(tmp_path / "dropout.json", "ids would be random", json.dumps(content).encode())
    with pytest.raises(DataError, match="no manifest"):
        load_tokenizer(tmp_path)


def test_gigatokens_memory_is_bounded(
    tokenizers_by_kind: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps each new word; a million of them are 60 MB and more."""
    gigatoken = tokenizers_by_kind["gigatoken"]

    def growth() -> int:
        before = resident_bytes()
        for start in range(0, 1_000_000, 10_000):
            gigatoken.encode_batch([f" w{number:07}x" for number in range(start, start + 10_000)])
        return resident_bytes() - before

    monkeypatch.setattr(tokenizer_gigatoken, "_CACHED_CHARS", 1 << 20)
    growth()  # up to what it always holds
    assert growth() < 30 << 20
    monkeypatch.setattr(tokenizer_gigatoken, "_CACHED_CHARS", 1 << 40)
    assert growth() > 40 << 20

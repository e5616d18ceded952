"""A small real tokenizer of the Nemotron 3 family, for tests and small checkpoints of our own.

Byte-level BPE with the family's special tokens at their ids, trained in milliseconds on a short text of our own, with a
chat template of our own in the family's format. Not for use with NVIDIA's weights, which bring their own.
"""

import json
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

# Ids 0 to 17 of the family; reserved ones follow (the family has them up to id 999).
SPECIAL = (
    ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
    + ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    + ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
)
RESERVED = [f"<SPECIAL_{id}>" for id in range(len(SPECIAL), 32)]
SMALLEST = len(SPECIAL) + len(RESERVED) + 256
_MARKUP = re.compile("|".join(map(re.escape, SPECIAL)))

# How LLaMA 3 splits text before merging: contractions, words, a few digits, punctuation, line ends, blanks.
_SPLIT = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,DIGITS}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def write(folder: str | Path, vocab_size: int = 512, corpus: Iterable[str] | None = None, digits: int = 3) -> None:
    """Writes tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja into `folder`.

    vocab_size is exact, special tokens included; `corpus` replaces the text of our own, which is enough for 2,000.
    `digits` is the most that one token holds: three in the family, one for a small model that is to calculate.
    The same arguments give the same files. ValueError if vocab_size is too small, or the corpus is.
    """
    if vocab_size < SMALLEST:
        raise ValueError(f"vocab_size must be at least {SMALLEST} (special tokens and bytes), got {vocab_size}")
    here = files("leyden.testing")
    if corpus is None:
        corpus = [here.joinpath("corpus.txt").read_text(encoding="utf-8")]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT.replace("DIGITS", str(digits))), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", SPECIAL.index("<s>"))]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in SPECIAL + RESERVED],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in corpus for part in _MARKUP.split(text)), trainer)
    if (found := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(f"vocab_size must be at most {found} with this corpus, got {vocab_size}")

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "pad_token": "<unk>"}
    config = names | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "special_tokens_map.json").write_text(json.dumps(names, indent=2), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    template = here.joinpath("chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")

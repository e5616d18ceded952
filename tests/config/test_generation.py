import json

import pytest

from leyden.config.generation import GenerationDefaults, token_ids
from leyden.errors import ConfigError


def test_a_release_file(tmp_path) -> None:
    raw = {
        "bos_token_id": 1,
        "do_sample": True,
        "eos_token_id": [2, 11],
        "pad_token_id": 0,
        "temperature": 1,
        "top_p": 0.95,
        "transformers_version": "5.8.1",
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    assert GenerationDefaults.from_folder(tmp_path) == GenerationDefaults(
        temperature=1, top_p=0.95, eos_token_ids=(2, 11)
    )
    laid_over = GenerationDefaults.from_folder(tmp_path, {"max_new_tokens": 64, "top_k": 20, "min_p": 0.1})
    assert laid_over == GenerationDefaults(
        temperature=1, top_p=0.95, top_k=20, min_p=0.1, max_new_tokens=64, eos_token_ids=(2, 11)
    )


def test_no_file_recommends_nothing(tmp_path) -> None:
    assert GenerationDefaults.from_folder(tmp_path) == GenerationDefaults()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"temperature": -1}, "generation_config.json or --override-generation-config: temperature must be"),
        ({"top_p": 0}, "top_p must be"),
        ({"top_k": 1.5}, "top_k must be"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id must be a token id or a list of them"),
    ],
)
def test_values_that_no_request_could_use(raw: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GenerationDefaults.from_dict(raw)


def test_token_ids() -> None:
    assert token_ids("k", None) == ()
    assert token_ids("k", 7) == (7,)
    assert token_ids("k", [2, 11, 2]) == (2, 11)

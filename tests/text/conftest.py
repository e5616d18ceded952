import pytest

from leyden.testing.tokenizer import write
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="session")
def template(folder, tokenizer):
    return ChatTemplate.from_folder(folder, tokenizer)

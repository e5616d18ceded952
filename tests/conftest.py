import logging
import os
from collections.abc import Iterator

import pytest
import torch

# Triton decides when it is first imported, by whomever, whether kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The models of the tests are tiny: a second thread would cost more than it brings, the more so beside other processes.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A test may run a command, and commands set up logging: handlers and levels of the whole process."""
    root, ours = logging.getLogger(), logging.getLogger("leyden")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])

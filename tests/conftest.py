"""Settings and families that all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from checkpoints import Family

# Before anybody imports torch: the machines that run this have two cores and several workers.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# A run that a shell put into the background inherits that SIGINT is ignored, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("mfs", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("mfs")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models this small are many times slower on two busy cores than on one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A tied base with the variants math (low rank, two shards), code (dense) and vocab (two more tokens)."""
    from checkpoints import make_family

    return make_family(tmp_path_factory.mktemp("tied"), tie=True)


@pytest.fixture(scope="session")
def untied_family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """The same with a head apart from the embeddings."""
    from checkpoints import make_family

    return make_family(tmp_path_factory.mktemp("untied"), tie=False)

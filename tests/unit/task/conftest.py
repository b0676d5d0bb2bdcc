"""Texts that several tests read; the helpers of this folder are imported by name, whatever the import mode."""

import sys
from pathlib import Path

import pytest

from anyformer.task.text import Text

sys.path.insert(0, str(Path(__file__).parent))
from texts import write


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("text"), 150)


@pytest.fixture(scope="module")
def library():
    return Text()

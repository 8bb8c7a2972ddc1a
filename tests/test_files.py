import os

import pytest

from cgkit.errors import CgkitError
from cgkit.files import UnwritableFileError, whole_file


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "deep" / "file"
    with whole_file(path) as part:
        part.write_text("one")
    assert path.read_text() == "one"
    with pytest.raises(ZeroDivisionError), whole_file(path) as part:
        part.write_text("half")
        1 / 0  # noqa: B018
    assert path.read_text() == "one" and os.listdir(path.parent) == ["file"]


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnwritableFileError, match=r"file/page\.html cannot be written"):
        with whole_file(tmp_path / "file" / "page.html"):
            raise AssertionError("never reached")
    assert issubclass(UnwritableFileError, CgkitError) and os.listdir(tmp_path) == ["file"]

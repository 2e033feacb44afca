"""Pictures: well-formed, the same each time, and one clear line where there can be none."""

import sys
import xml.etree.ElementTree as ElementTree

import pytest

from slimpipe.planner.draw_picture import write_picture
from slimpipe.planner.shown import timeline_of
from tests.unit.planner.settings import setting


@pytest.fixture(scope="module")
def timelines():
    common = setting(p=2, n=2, m=2, exchange="on", vocab_parallel="output", head=0.2)
    return [timeline_of("1F1B", common), timeline_of("SlimPipe", common)]


def test_svg(timelines, tmp_path):
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        write_picture(file, timelines, memory=True)
    assert files[0].read_bytes() == files[1].read_bytes()
    texts = [element.text for element in ElementTree.parse(files[0]).iter() if element.tag.endswith("}text")]
    for timeline in timelines:
        assert f"{timeline.title}: {timeline.idle_share:.1%} idle" in texts
    assert {"a", "b'", "a0", "b1'", "rank 1", "forward", "backward", "vocabulary", "idle", "seconds"} <= set(texts)


def test_png(timelines, tmp_path):
    pytest.importorskip("matplotlib")
    write_picture(tmp_path / "a.png", timelines[1:], dpi=50)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_format(timelines, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"a\.xyz: Format 'xyz' is not supported"):
        write_picture(tmp_path / "a.xyz", timelines)


def test_without_matplotlib(timelines, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'slimpipe\[picture\]'"):
        write_picture(tmp_path / "a.svg", timelines)

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.segments import SEGMENT_CHARS, segments, segments_of_chunks

PARTS = st.lists(
    st.sampled_from(["word ", "a\n", " ", "\n\n", "1234", "日本", "x" * 1500, " " * 1500, "Tom's; "]), max_size=60
)


@given(parts=PARTS, sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=5), at_breaks=st.booleans())
@settings(deadline=None)
def test_segments_join_to_the_text_however_it_arrives(parts: list[str], sizes: list[int], at_breaks: bool) -> None:
    text = "".join(parts)
    whole = list(segments(text, at_breaks))
    assert "".join(whole) == text
    assert all(len(segment) <= SEGMENT_CHARS for segment in whole)
    chunks: list[str] = []
    start = 0
    while start < len(text):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(text[start : start + size])
        start += size
    assert list(segments_of_chunks(chunks, at_breaks)) == whole


def test_cuts_lie_before_spaces_and_breaks() -> None:
    text = "some words here; and\nmore\n" * 1000
    parts = list(segments(text))
    assert len(parts) > 5
    assert all(part[0] in " \n" for part in parts[1:])
    assert all(part[0] == " " for part in list(segments(text, at_breaks=False))[1:])


def test_text_without_a_good_place_is_cut_at_the_limit() -> None:
    assert [len(part) for part in segments("a" * (2 * SEGMENT_CHARS + 5))] == [SEGMENT_CHARS, SEGMENT_CHARS, 5]

"""The timeline shows what its caption says."""

from itertools import pairwise

import pytest
from benchmarks import timeline

import offbeat


@pytest.mark.nightly
def test_the_timeline_shows_waits_and_landings() -> None:
    """Every BSP worker waits for its sums, streaming workers wait shortly; parts land in turn."""
    end = 1000 * timeline.STEPS * timeline.STEP_SECONDS
    bsp, streaming = (
        timeline.record(one)
        for one in (offbeat.BSP(), offbeat.StreamingAveraging(parts=timeline.PARTS))
    )

    def waited(shown: timeline.Timeline, rank: int) -> float:
        """Milliseconds shown."""
        spans = [s for s in shown.spans if (s.rank, s.kind) == (rank, "wait") and s.end > 0]
        return sum(min(span.end, end) - max(span.start, 0.0) for span in spans)

    for rank in range(timeline.WORKERS):
        assert waited(bsp, rank) > 0.3 * end
        assert waited(streaming, rank) < 0.15 * end
        landed = [p for worker, _, parts in streaming.landings if worker == rank for p in parts]
        assert len(landed) >= timeline.PARTS
        assert all(after == (before + 1) % timeline.PARTS for before, after in pairwise(landed))
    assert not any(parts for _, _, parts in bsp.landings)
    sent = {(colour, second) for _, colour, second in timeline.transfers(streaming)}
    assert sent == {(colour, second) for colour in timeline.COLOURS for second in (False, True)}
    assert {colour for _, colour, _ in timeline.transfers(bsp)} == {timeline.BUCKETS}

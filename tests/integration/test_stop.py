"""A run that is told to stop finishes the epoch that runs, and begins no other."""

from __future__ import annotations

from pathlib import Path

from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.testing.local import LocalEngine
from tests.support.pipelines import Recorder, pipeline_options, run_to_end
from tests.support.samples import SampleInput, table_ids


class StopsEarly(Recorder):
    """Asks for a stop as soon as the first epoch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runner: Runner | None = None
        self.ran_epochs: list[int] = []

    def running(self, epoch: int) -> None:
        self.ran_epochs.append(epoch)
        assert self.runner is not None
        self.runner.stop()


def test_a_run_stops_after_the_current_epoch(tmp_path: Path) -> None:
    sample = SampleInput(tmp_path / "in")
    for name in ("a", "b", "c", "d"):
        sample.add(f"{name}.json", 3)
    options = pipeline_options(str(tmp_path / "in"), str(tmp_path / "out"), max_files=1)
    told = StopsEarly()
    told.runner = Runner(open_pipeline(options), LocalEngine(1), told)
    result = told.runner.run()
    assert (result.exit_code, result.epochs, told.ran_epochs) == (0, 1, [1])
    assert sum(table_ids(tmp_path / "out").values()) == 3
    run_to_end(options)
    assert table_ids(tmp_path / "out") == sample.ids

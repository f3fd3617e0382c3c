"""Prometheus metrics of the service: what the overview shows of every pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from firnline import __version__
from firnline.service.supervise.supervisor import Seen
from firnline.service.views import summary
from firnline.types import Clock

_GAUGES = (
    ("epoch", "epoch", "The newest epoch that the service has seen."),
    ("lag_seconds", "lag_seconds", "Age of the oldest input that waits, as the run last recorded it."),
    ("age_seconds", "seen_age_seconds", "Seconds since the service last looked at the pipeline."),
)


class OverviewMetrics(Collector):
    """Collects from what the supervisor has seen. Reads no pipeline."""

    def __init__(self, load: Callable[[], Sequence[Seen]], clock: Clock) -> None:
        self._load = load
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        now = self._clock.now()
        rows = [summary(seen, now) for seen in self._load()]
        build = GaugeMetricFamily("firnline_service_build_info", "The version of the service.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        state = GaugeMetricFamily(
            "firnline_service_state", "1 for the state that the pipeline is in.", labels=["pipeline", "state"]
        )
        wanted = GaugeMetricFamily(
            "firnline_service_wanted", "1 for what operators want of the pipeline.", labels=["pipeline", "wanted"]
        )
        person = GaugeMetricFamily(
            "firnline_service_needs_person", "1 if a person must look at the pipeline.", labels=["pipeline"]
        )
        for row in rows:
            state.add_metric([row["pipeline"], row["state"]], 1)
            person.add_metric([row["pipeline"]], int(row["needs_person"] is not None))
            if row["wanted"] is not None:
                wanted.add_metric([row["pipeline"], row["wanted"]], 1)
        yield from (state, wanted, person)
        for key, name, text in _GAUGES:
            family = GaugeMetricFamily(f"firnline_service_{name}", text, labels=["pipeline"])
            for row in rows:
                if row[key] is not None:
                    family.add_metric([row["pipeline"]], float(row[key]))
            yield family

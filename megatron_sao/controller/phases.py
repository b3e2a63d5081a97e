"""Where a publish is, and what its phases took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_sao.controller.engines import Failure
from megatron_sao.metrics import Metric
from megatron_sao.trace import Trace

NAMES = (
    *("total", "recover", "plan", "connect", "prepare", "pause", "begin", "gather", "flatten", "send", "load"),
    *("end", "check", "resume", "verify"),
)


@dataclass(slots=True)
class Phases:
    """Of one attempt. `phase` and `bucket` are where it is, or where its first failure was."""

    trace: Trace
    phase: str = "plan"
    bucket: int | None = None
    failed: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        start_s = time.monotonic()
        with self.at(phase):
            yield
        self.add(phase, time.monotonic() - start_s)

    @contextmanager
    def at(self, phase: str, bucket: int | None = None) -> Iterator[None]:
        """In the trace, not in the times: what runs beside something else is no part of a sum."""
        if bucket is None:
            self.phase = phase
        with self.trace.span("publish", phase, **({} if bucket is None else {"bucket": bucket})):
            try:
                yield
            except Failure:
                if not self.failed:
                    self.phase, self.bucket, self.failed = phase, bucket, True
                raise

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def metrics(self) -> dict[str, Metric]:
        """publish/*_s; 0 for a phase that was not run."""
        return {f"publish/{name}_s": Metric(self.seconds.get(name, 0.0)) for name in NAMES}

"""What is known of each step, and where it is written.

One JSON object a step: `step`, `loss` (nats per token), `grad_norm` (before clipping), `learning_rate`,
`step_time_s`, `tokens_per_s`, `model_tflops_per_device`, `mfu`, `device_bytes_in_use`,
`device_peak_bytes`, `process_peak_rss_bytes`, whatever else the model tells (its `metrics`), and
`validation_loss` where it was measured. What a machine does not tell is null, and so is what is not finite: JSON has no word for it.

`model_tflops_per_device` is the model's FLOPs of one step (`flops_per_token`: forward and backward,
attention causal, nothing recomputed) over step time and devices, in 1e12/s; `mfu` is that over the
device's dense bfloat16 peak.
"""

import json
import math
import resource
from pathlib import Path
from typing import Any

import jax

from forebay.errors import missing_extra
from forebay.hardware.present import machine_of
from forebay.train.program import Program


class StepMetrics:
    """Makes a step's record from its results and its time."""

    def __init__(self, program: Program):
        self._program = program
        self._devices = program.sharding.mesh.size
        machine = machine_of(program.sharding.mesh.devices.flat[0])
        self._peak_flops = machine.flops_per_s["bf16"] if machine else None

    def record(self, step: int, results: dict[str, Any], step_time_s: float | None) -> dict[str, Any]:
        """`step` counts from 1; `step_time_s` is None for a step whose time is not its own (the first compiles)."""
        flops = None if step_time_s is None else self._program.flops_per_step / step_time_s / self._devices
        memory = jax.local_devices()[0].memory_stats() or {}
        return {
            "step": step,
            **{name: float(value) for name, value in results.items()},
            "step_time_s": step_time_s,
            "tokens_per_s": None if step_time_s is None else self._program.tokens_per_step / step_time_s,
            "model_tflops_per_device": None if flops is None else flops / 1e12,
            "mfu": None if flops is None or self._peak_flops is None else flops / self._peak_flops,
            "device_bytes_in_use": memory.get("bytes_in_use"),
            "device_peak_bytes": memory.get("peak_bytes_in_use"),
            "process_peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


class MetricsFile:
    """`metrics.jsonl`, appended line by line, and TensorBoard events beside it.

    Raises:
        MissingExtraError: TensorBoard is wanted and its writer is not installed.
    """

    def __init__(self, run_dir: Path, tensorboard: bool):
        self._lines = (run_dir / "metrics.jsonl").open("a")
        self._events: Any = None
        if tensorboard:
            try:
                from tensorboardX import SummaryWriter
            except ModuleNotFoundError:
                raise missing_extra("tensorboardX", "train", "writing TensorBoard events (tensorboard=true)") from None
            self._events = SummaryWriter(str(run_dir / "tensorboard"), write_to_disk=True)

    def write(self, record: dict[str, Any]) -> None:
        record = {k: v if v is not None and math.isfinite(v) else None for k, v in record.items()}
        self._lines.write(json.dumps(record) + "\n")
        self._lines.flush()
        if self._events is not None:
            for name, value in record.items():
                if name != "step" and value is not None:
                    self._events.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._lines.close()
        if self._events is not None:
            self._events.close()


class NoMetricsFile:
    """What processes other than the first write to."""

    def write(self, record: dict[str, Any]) -> None:
        del record

    def close(self) -> None:
        pass


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run so far."""
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

"""Small scheduled programs and a machine with round figures, for timelines that are worked out by hand.

The machine does 1000 FLOP/s, moves 100 B/s in HBM, 10 B/s to the host and 20 B/s from it, 50 B/s within
domains of 4 devices and 10 B/s through each device's port to others. Nothing is added to any operation.
"""

import math

from forebay.hardware import CudaTarget, Hardware, Host, HostLink, Interconnect
from forebay.timeline import IDEAL, CostModel, Timeline
from forebay.timeline.simulate import Run, simulate
from forebay.timeline.summary import summarise
from forebay.xla.load import module_of
from forebay.xla.schedule import Schedule, read_schedule

CUDA = CudaTarget("toy", (9, 0), False, 1, 1, 1.0, 1, 1, 1, 1)


def machine(*, hbm: float = 100.0, cpu_memory: float | None = None) -> Hardware:
    return Hardware(
        name="toy", title="a machine with round figures", platform="cuda", hbm_bytes=10**6, hbm_bytes_per_s=hbm,
        flops_per_s={"bf16": 1000.0, "tf32": 500.0, "fp8": 2000.0},
        host_link=HostLink("link", 10.0, 20.0, d2h_measured_bytes_per_s=10.0, h2d_measured_bytes_per_s=20.0),
        host=Host(10**9, 4, 4, cpu_memory), interconnect=Interconnect("links", 4, 50.0, 10.0), cuda=CUDA,
    )  # fmt: skip


TOY = machine()
WIDE = machine(hbm=math.inf)
"""The same with an HBM that is never short, for work that is arithmetic alone."""


def lines(text: str) -> str:
    return "\n".join(f"  {line.strip()}" for line in text.strip().splitlines())


def hlo(entry: str, *computations: str, devices: int = 4, head: str = "is_scheduled=true") -> str:
    """A module: the lines of the entry, whose last is the root, and other computations."""
    others = "\n\n".join(computations)
    return f"HloModule m, {head}, num_partitions={devices}\n\n{others}\n\nENTRY %main (x: s8[]) -> s8[] {{\n{lines(entry)}\n}}\n"


def computation(name: str, body: str) -> str:
    return f"%{name} (p: s8[]) -> s8[] {{\n{lines(body)}\n}}"


def metadata(op_name: str) -> str:
    return f', metadata={{op_name="{op_name}"}}' if op_name else ""


def kernel(name: str, num_bytes: int, op_name: str = "") -> str:
    """A kernel that writes `num_bytes` and reads nothing: `num_bytes` / 100 seconds."""
    return f"%{name} = s8[{num_bytes}]{{0}} iota(), iota_dimension=0{metadata(op_name)}"


def product(name: str, flops: int, dtype: str = "bf16", op_name: str = "") -> str:
    """A product of two vectors: `flops` / 1000 seconds in bfloat16 where HBM is wide."""
    shape = f"{dtype}[{flops // 2}]{{0}}"
    return (
        f"%{name}.l = {shape} constant({{...}})\n%{name}.r = {shape} constant({{...}})\n"
        f"%{name} = f32[] dot(%{name}.l, %{name}.r), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}"
        f"{metadata(op_name)}"
    )


def to_host(name: str, num_bytes: int, operand: str = "a", scope: str = "") -> str:
    """Starts a copy to the host: `num_bytes` / 10 seconds."""
    return f"%{name} = (s8[{num_bytes}]{{0:S(5)}}, s8[{num_bytes}]{{0}}, u32[]) copy-start(%{operand}){metadata(scope)}"


def on_host(name: str, num_bytes: int, start: str) -> str:
    return f"%{name} = s8[{num_bytes}]{{0:S(5)}} copy-done(%{start})"


def from_host(name: str, num_bytes: int, operand: str = "h", scope: str = "") -> str:
    """Starts a copy from the host: `num_bytes` / 20 seconds."""
    return f"%{name} = (s8[{num_bytes}]{{0}}, s8[{num_bytes}]{{0:S(5)}}, u32[]) copy-start(%{operand}){metadata(scope)}"


def on_device(name: str, num_bytes: int, start: str) -> str:
    return f"%{name} = s8[{num_bytes}]{{0}} copy-done(%{start})"


def argument(name: str, num_bytes: int, number: int = 0, host: bool = False) -> str:
    layout = "{0:S(5)}" if host else "{0}"
    return f'%{name} = s8[{num_bytes}]{layout} parameter({number}), metadata={{op_name="state.{name}"}}'


def all_gather(name: str, put_in: int, operand: str, devices: int = 4, groups: str = "{}") -> str:
    """Starts an all-gather of `put_in` bytes from each device."""
    gathered = put_in * devices
    return (
        f"%{name} = ((s8[{put_in}]{{0}}), s8[{gathered}]{{0}}) all-gather-start(%{operand}), replica_groups={groups}, "
        f"dimensions={{0}}"
    )


def gathered(name: str, num_bytes: int, start: str) -> str:
    return f"%{name} = s8[{num_bytes}]{{0}} all-gather-done(%{start})"


def loop(name: str, body: str, trips: int | None, init: str = "init", shape: str = "(s32[])") -> str:
    noted = "" if trips is None else f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return f"%{name} = {shape} while(%{init}), condition=%condition, body=%{body}{noted}"


CONDITION = computation("condition", "%c.p = (s32[]) parameter(0)\nROOT %c.r = pred[] constant(true)")
"""A condition that says nothing."""
START = "%zero = s32[] constant(0)\n%init = (s32[]) tuple(%zero)"
"""The state of a loop that is only a counter."""


def repeated(name: str, *work: str) -> str:
    """A loop body that hands its counter on."""
    inside = "\n".join(work)
    return computation(
        name,
        f"%{name}.p = (s32[]) parameter(0)\n%{name}.i = s32[] get-tuple-element(%{name}.p), index=0\n{inside}\n"
        f"ROOT %{name}.r = (s32[]) tuple(%{name}.i)",
    )


def read(text: str, hardware: Hardware = TOY) -> Schedule:
    return read_schedule(module_of(text), hardware.platform)


def run(text: str, hardware: Hardware = TOY, trip_counts: dict[str, int] | None = None) -> Run:
    schedule = read(text, hardware)
    return simulate(schedule, CostModel(hardware, schedule.devices, IDEAL), trip_counts)


def timeline(text: str, hardware: Hardware = TOY) -> Timeline:
    return summarise(run(text, hardware), read(text, hardware), hardware)


def exposed(made: Timeline) -> dict[str, float]:
    """Exposed seconds by name, of what is exposed at all."""
    total: dict[str, float] = {}
    for e in made.exposed:
        if e.exposed_s:
            total[e.name] = total.get(e.name, 0.0) + e.exposed_s
    return total

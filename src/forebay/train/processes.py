"""A run of several processes: joining it, leaving it, and agreeing on when to stop.

All processes run the same program on the same configuration; jax connects them. The first one alone writes the run
directory's files and prints; checkpoints are written by all. How the processes came to be is not known here: a
launcher started them, or `forebay.train.launch`.
"""

import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jax
import numpy as np

from forebay.errors import EXIT_FAILED, UserError

DETECT = "auto"
"""The coordinator's address where jax is to find out address, number and place from the cluster."""

_JOINING_S = 120
"""How long processes wait for each other at the start."""
_TIED = "FOREBAY_TIED"


class LostProcessError(UserError):
    """Another process of the run ended before this one could go on."""

    exit_code = EXIT_FAILED


def check_processes(
    *, processes: int, devices: int | None, mesh: str, coordinator: str = "", process_id: int | None = None
) -> None:
    """Whether the numbers go together, before anything is started.

    Raises:
        UserError: names the number that does not.
    """
    from forebay.sharding import parse_mesh

    if processes < 1:
        raise UserError(f"processes={processes} must be at least 1")
    if process_id is not None and not coordinator:
        raise UserError("process_id is for processes that a launcher starts: give them a --coordinator too")
    if coordinator and coordinator != DETECT:
        if not re.fullmatch(r".+:\d{1,5}", coordinator):
            raise UserError(f"coordinator={coordinator!r}: write host:port, or auto on a cluster that jax knows")
        if process_id is None:
            raise UserError(f"coordinator={coordinator!r} needs to know which process this is: give --process_id")
        if not 0 <= process_id < processes:
            raise UserError(
                f"process_id={process_id} of processes={processes}: they count from 0 to {processes - 1}; "
                f"give every process the same --processes"
            )
    if devices is not None:
        if devices < 1:
            raise UserError(f"devices={devices} must be at least 1")
        if devices % processes:
            raise UserError(
                f"devices={devices} do not divide over processes={processes}: choose a multiple of {processes}"
            )
        parse_mesh(mesh, devices)


def use_cpu_devices(count: int) -> None:
    """Has jax make this many devices of this process's CPU; before it makes any."""
    # the flag says the same, and jax refuses to be told twice
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags).strip()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def join(coordinator: str, processes: int, process_id: int | None) -> None:
    """Connects this process with the others of the run.

    Args:
        coordinator: `host:port` of the first process; `DETECT` leaves this and the rest to jax's knowledge of clusters.

    Raises:
        UserError: the address cannot be used; the others do not come; no cluster is known.
    """
    watch_parent()
    _keep_stdout()
    logging.getLogger("jax._src.distributed").setLevel(logging.ERROR)  # of proxies, which is no concern of a reader
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if coordinator == DETECT:
        try:
            jax.distributed.initialize(initialization_timeout=_JOINING_S)
        except (ValueError, TypeError):
            raise UserError(
                "coordinator=auto: jax does not recognise a cluster here (SLURM, Open MPI, Kubernetes, Cloud TPU): give "
                "--coordinator host:port, --processes and --process_id"
            ) from None
        except Exception as error:
            raise _not_joined("the coordinator that jax found", error) from None
        return
    if process_id == 0:
        _check_port(coordinator)
    try:
        jax.distributed.initialize(coordinator, processes, process_id, initialization_timeout=_JOINING_S)
    except Exception as error:
        raise _not_joined(coordinator, error) from None


def _keep_stdout() -> None:
    """Gloo greets its peers on the standard output, from C++: only what Python prints goes there from now on."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _not_joined(coordinator: str, error: Exception) -> UserError:
    reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    return UserError(
        f"could not join the run at {coordinator} ({reason}): check that all processes were started, each with its own "
        f"process_id, and can reach that address"
    )


def _check_port(coordinator: str) -> None:
    """gRPC would share a port that is taken, and the processes would talk to someone else."""
    port = int(coordinator.rpartition(":")[2])
    try:
        with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what lingers of a connection is no listener
            probe.bind(("", port))
            probe.listen(1)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"coordinator={coordinator!r}: port {port} cannot be used ({reason}): choose another") from None


def watch_parent() -> None:
    """Where `forebay.train.launch` started this process: ends it when that one is gone, however that came about.

    The starter holds the other end of a pipe, on standard input, and never writes to it.
    """
    if not os.environ.pop(_TIED, ""):
        return
    tie = sys.stdin.fileno()

    def watch() -> None:
        os.read(tie, 1)
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, daemon=True).start()


def tied(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is to end with this one."""
    return {**environment, _TIED: "1"}


def is_joined() -> bool:
    return jax.distributed.is_initialized()


def leave(code: int, reason: str = "") -> NoReturn:
    """Ends a joined process that failed, without waiting for the others as jax does when all is well.

    The others find out by themselves: from the process that started them all, else from a collective or from jax's
    coordination service.
    """
    if reason:
        print(f"forebay: {' '.join(reason.split())}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def lost_process(error: BaseException) -> LostProcessError | None:
    """What an error of jax means where it comes of another process's end; None where it means something else."""
    if not isinstance(error, jax.errors.JaxRuntimeError) or not is_joined():
        return None
    text = str(error)
    if not re.search(r"gloo|connection closed|connection reset|coordination service|heartbeat|unavailable", text, re.I):
        return None
    return LostProcessError(
        f"process {jax.process_index()} of {jax.process_count()} lost another one ({text.strip().partition(chr(10))[0][:160]}): "
        f"see what that one says; continue with --resume from the last checkpoint"
    )


class StopVote:
    """Whether any process was told to stop, agreed step by step: all of them leave the loop after the same one.

    A process that is alone asks nobody. Otherwise every step has a vote, which is counted on the devices beside the
    step and read one step later, so that nothing waits for it.
    """

    def __init__(self, mesh: jax.sharding.Mesh, alone: bool | None = None):
        self._alone = jax.process_count() == 1 if alone is None else alone
        if self._alone:
            return
        devices = mesh.devices.ravel()
        self._sharding = jax.sharding.NamedSharding(
            jax.sharding.Mesh(devices, "all"), jax.sharding.PartitionSpec("all")
        )
        self._devices = len(devices)
        everywhere = jax.sharding.NamedSharding(self._sharding.mesh, jax.sharding.PartitionSpec())
        self._count = jax.jit(lambda votes: votes.sum(), out_shardings=everywhere)
        self._pending: jax.Array | None = None

    def __call__(self, received: Sequence[int]) -> bool:
        """After each step, in every process: whether to stop now."""
        if self._alone:
            return bool(received)
        told = np.full(1, bool(received), np.int32)
        votes = jax.make_array_from_callback((self._devices,), self._sharding, lambda _: told)
        before, self._pending = self._pending, self._count(votes)
        return before is not None and int(before) > 0


def rows_here(sharding: jax.sharding.Sharding, shape: Sequence[int]) -> tuple[int, int]:
    """Which part of a batch's rows the devices of this process hold: the block `index` of `count` equal ones.

    Devices that split something else than the batch hold the same rows; where this process's rows are no such block,
    it takes all.
    """
    indices = sharding.addressable_devices_indices_map(tuple(shape)).values()
    rows = [range(shape[0])[index[0]] for index in indices if index is not None]
    start, stop = min(r.start for r in rows), max(r.stop for r in rows)
    size = stop - start
    if shape[0] % size or start % size:
        return 0, 1
    return start // size, shape[0] // size

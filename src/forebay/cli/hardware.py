"""`forebay hardware`: the machines forebay knows, and where each figure comes from."""

import dataclasses
import json
import sys

from forebay.errors import EXIT_OK


@dataclasses.dataclass(frozen=True)
class HardwareArgs:
    """Which machines to show.

    Attributes:
        name: show this machine alone, each figure with its source.
        file: a TOML file of your own machines, read besides those of FOREBAY_HARDWARE and
            ~/.config/forebay/hardware.toml.
        json: print JSON (schema forebay.hardware/1) instead of a table.
    """

    name: str | None = None
    file: str | None = None
    json: bool = False


Config = HardwareArgs
POSITIONAL = "name"


def run(args: HardwareArgs) -> int:
    """Prints all machines, or the one that is named. Returns 0.

    Raises:
        UserError: there is no such machine, or a file of machines cannot be read.
    """
    from forebay.hardware import get_hardware, list_hardware
    from forebay.report.hardware import print_hardware_details, print_hardware_table

    files = [] if args.file is None else [args.file]
    one = None if args.name is None else get_hardware(args.name, files)
    machines = [one] if one is not None else list(list_hardware(files).values())
    if args.json:
        report = {"schema": "forebay.hardware/1", "hardware": [machine.to_json() for machine in machines]}
        json.dump(report, sys.stdout, indent=2)
        print()
    elif one is not None:
        print_hardware_details(one)
    else:
        print_hardware_table(machines)
    return EXIT_OK

"""Where plans and predictions get the machine's rates from."""

from __future__ import annotations

from dataclasses import dataclass, field

from h2o_flexgen.config.flags import flag


@dataclass(frozen=True)
class PlanningConfig:
    """What a program does to know how fast the machine is.

    hardware   a shipped profile's name, or a file; None: what was calibrated on this machine
    calibrate  True: calibrate it now, if that was never done; False: never; None: only where something has to move
    """

    hardware: str | None = field(
        default=None,
        metadata=flag(
            "--hardware",
            help="plan on the rates of another machine (t4, a100, h200), or of a file that calibrate wrote",
            metavar="NAME|FILE",
            unset="this machine, as calibrated",
        ),
    )
    calibrate: bool | None = field(
        default=None,
        metadata=flag(
            "--calibrate",
            help="measure this machine first, for about 45 s, unless that was done before; without its rates plans go "
            "by rule and nothing is predicted",
            unset="where not everything fits beside the compute",
        ),
    )

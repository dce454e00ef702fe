"""Options that several commands share: where a checkpoint's backbone lies and how it is loaded."""

from __future__ import annotations

from typing import Annotated

import typer

BaseOption = Annotated[
    str | None, typer.Option(help="Where the backbone lies, if not where the checkpoint says.", show_default=False)
]
DtypeOption = Annotated[str, typer.Option(help="auto (as stored), bfloat16, float16 or float32.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="torch device.  [default: an accelerator, else cpu]", show_default=False)
]
QuantizationOption = Annotated[str | None, typer.Option(help="8bit or 4bit (bitsandbytes).", show_default=False)]
TrustRemoteCodeOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the base. Only for bases you trust.")
]

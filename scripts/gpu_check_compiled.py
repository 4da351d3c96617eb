"""What Triton compiles during scripts/gpu_check.sh, as one file among the records: another call need not do it again.

Kernels are compiled into a folder of their own, or that of TRITON_CACHE_DIR. After every section it is packed into
OUTPUT/kernels.tar.gz; a call that finds that file, here or on another machine, begins with what is in it.
"""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

from gpu_check_records import say, scratch_folder

NAME = "kernels.tar.gz"


def cache_folder() -> Path:
    """Where programs that are started from now on have Triton compile to. Only machine code is kept: a tenth of all."""
    folder = os.environ.setdefault("TRITON_CACHE_DIR", str(scratch_folder() / "triton"))
    os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")
    return Path(folder)


def unpack(output: Path, folder: Path) -> None:
    """Puts what `pack` left in `output` into `folder`; what cannot be read is compiled again."""
    path = output / NAME
    if not path.is_file():
        return
    try:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
        _relocate(folder)
    except (OSError, EOFError, tarfile.TarError, ValueError) as error:
        say(f"{path} is of no use: {error}")


def pack(folder: Path, output: Path) -> None:
    """Leaves what `folder` holds in `output`, in place of what `unpack` found there."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "tmp.pid_" not in path.parent.name]
    if not files:
        return
    made = output / f"{NAME}.new"
    with tarfile.open(made, "w:gz", compresslevel=1) as archive:
        for path in files:
            archive.add(path, path.relative_to(folder))
    made.replace(output / NAME)


def _relocate(folder: Path) -> None:
    """Triton keeps absolute paths of the files of a kernel, which lie side by side: now here."""
    for path in folder.glob("*/__grp__*.json"):
        children = json.loads(path.read_text(encoding="utf-8"))["child_paths"]
        here = {name: str((path.parent / name).absolute()) for name in children}
        path.write_text(json.dumps({"child_paths": here}), encoding="utf-8")

#!/usr/bin/env bash
# Makes an environment on top of the Python that has torch, with what that lacks from a folder of wheels; no network.
#   scripts/gpu_env.sh WHEELS FOLDER       PYTHON=... names the Python below (python3); torch is never installed
# FOLDER/peers has each peer of the comparison under its name, as h2o_flexgen.bench --peers wants them.
set -euo pipefail
wheels=$(realpath "${1:?usage: scripts/gpu_env.sh WHEELS FOLDER}") folder=$(realpath -m "${2:?}")
python=${PYTHON:-python3}
"$python" -c 'import torch' || { echo "$python has no torch: name one that has, as PYTHON" >&2; exit 2; }
[ -x "$folder/bin/python" ] || "$python" -m venv --without-pip --system-site-packages "$folder"
# A virtual environment's own packages are no system packages: where PYTHON is one, they are seen through a .pth file.
"$python" - "$folder" <<'PYTHON'
import subprocess, sys
from pathlib import Path

where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
inside = subprocess.run([f"{sys.argv[1]}/bin/python", "-c", where], capture_output=True, text=True, check=True).stdout
below = [path for path in sys.path if path.endswith("site-packages")]
(Path(inside.strip()) / "below.pth").write_text("".join(f"{path}\n" for path in below))
PYTHON
missing=$("$folder/bin/python" - "$wheels" <<'PYTHON'
import importlib.metadata, sys
from pathlib import Path

for wheel in sorted(Path(sys.argv[1]).glob("*.whl")):
    name = wheel.name.split("-")[0]
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        print(wheel)
PYTHON
)
if [ -n "$missing" ]; then
  echo "$missing" | sed 's|.*/|installing |' >&2
  echo "$missing" | tr '\n' '\0' | xargs -0 "$python" -m pip --python "$folder/bin/python" install -qq --no-index \
    --find-links "$wheels" --no-deps --disable-pip-version-check
fi
mkdir -p "$folder/peers"
for name in accelerate flexgen deepspeed; do
  ln -sfn "$folder" "$folder/peers/$name"
done
touch "$folder/installed"

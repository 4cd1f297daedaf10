#!/usr/bin/env bash
# Everything that waits for a GPU, most valuable first: each part takes at most eight minutes, and leaves its results in
# the folder at once, so that half of a lease is half of the results.
#
#   bash benchmarks/gpu_day.sh FOLDER                 all parts
#   bash benchmarks/gpu_day.sh FOLDER lora_8b plan    these parts
#   REHEARSAL=1 bash benchmarks/gpu_day.sh FOLDER     the same commands in small on a CPU, recipes only
#
# A part that fails is named at the end, and its output is in FOLDER/PART.log; the parts after it run all the same. What a
# part writes to temporary folders goes with it, models of 16 GB at the end: with TMPDIR=/dev/shm they are soon written
# and read.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?folder for the results}
shift
# as on a GPU, also where the CPU has no units for it
if [ -n "${REHEARSAL:-}" ]; then
  export ACCELERATE_MIXED_PRECISION=bf16
elif ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "PyTorch reaches no GPU here, and everything would be left out or measured on the CPU; REHEARSAL=1 tries it there."
  exit 2
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
every=(tests fp8_8b lora_8b offload_8b qlora_8b full_8b_8bit fp8_1b full_1b_bf16 full_1b plan)
minutes=8

step() { # model, method, and further flags
  local flags=(--peers recipe plain trl --max_length 4096 --rows 8 --micro_batch 2 --steps 12 "${@:3}")
  local model=$1
  if [ -n "${REHEARSAL:-}" ]; then # of several flags of a name the last one counts
    model=tiny
    flags=(--peers recipe "${@:3}" --max_length 256 --rows 2 --micro_batch 1 --steps 2)
  fi
  # three peers in eight minutes, each of which leaves its line when it ends; one that hangs leaves time for the others
  python -m benchmarks.step --models "$model" --methods "$2" "${flags[@]}" --packing --patience 180 \
    --keep_models "$models" --results "$out/step.jsonl"
}

run_part() {
  case $1 in
    tests)
      local only=(-n 8) # they wait for imports and files more than for the GPU
      if [ -n "${REHEARSAL:-}" ]; then only=(--collect-only -q); fi
      # only the files that hold such tests: the others may need packages that a GPU machine lacks
      mapfile -t files < <(grep -l '^@pytest.mark.gpu' tests/test_*.py)
      python -m pytest -m gpu --junitxml "$out/gpu_tests.xml" "${only[@]}" "${files[@]}"
      ;;
    fp8_8b) step Llama-3.1-8B lora --peers recipe fp8 --micro_batch 4 ;;
    fp8_1b) step Llama-3.2-1B full --weights bf16 --peers recipe fp8 ;;
    lora_8b) step Llama-3.1-8B lora ;;
    # of rows that the GPU holds in each of these ways, so that their speeds can be compared
    offload_8b) step Llama-3.1-8B lora --peers recipe recomputed offloaded --max_length 16384 --rows 2 --micro_batch 1 ;;
    qlora_8b) step Llama-3.1-8B qlora ;;
    full_8b_8bit) step Llama-3.1-8B full --weights bf16 --optimizer adamw_8bit ;;
    full_1b_bf16) step Llama-3.2-1B full --weights bf16 ;;
    full_1b) step Llama-3.2-1B full ;;
    plan)
      local how=(--minutes 7)
      if [ -n "${REHEARSAL:-}" ]; then how=(--rehearse); fi
      python -m benchmarks.plan_accuracy "${how[@]}" --results "$out/plan_accuracy.json"
      ;;
    *)
      echo "there is no part $1; there are: ${every[*]}"
      return 2
      ;;
  esac
}

models=$(mktemp -d) # of 16 GB and less, which several parts read
trap 'rm -rf "$models"' EXIT
failed=()
for part in "${@:-${every[@]}}"; do
  started=$SECONDS
  scratch=$(mktemp -d)
  # a part in a process group of its own, which ends whole when its time is over
  export -f run_part step
  TMPDIR=$scratch every_part="${every[*]}" out=$out models=$models timeout --kill-after 10 "${minutes}m" \
    bash -c 'every=($every_part); run_part "$1"' part "$part" >"$out/$part.log" 2>&1
  code=$?
  rm -rf "$scratch"
  echo "$part: $([ $code = 0 ] && echo done || echo "failed with $code"), $((SECONDS - started)) s"
  if [ $code != 0 ]; then failed+=("$part"); fi
done
if [ ${#failed[@]} != 0 ]; then
  echo "failed: ${failed[*]}"
  exit 1
fi

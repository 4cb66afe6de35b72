#!/usr/bin/env bash
# Train a small language model by reinforcement learning on two CPU cores: install the CPU stack, make a toy task and
# a model, warm it up by supervised fine-tuning, and train it with GRPO on two ranks.
#
#   bash tools/quickstart.sh            start, or continue where an earlier call stopped
#   bash tools/quickstart.sh --fresh    start over: remove runs/toy, runs/quickstart-sft and runs/quickstart
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
"") ;;
--fresh) rm -rf runs/toy runs/quickstart-sft runs/quickstart ;;
*) echo "usage: bash tools/quickstart.sh [--fresh]" >&2; exit 2 ;;
esac

export OMP_NUM_THREADS=1 # one thread per rank; torchrun would set it too, with a long warning
say() { printf '\n== %s\n' "$*"; }
SECONDS=0

say "1/4 the CPU stack"
bash tools/install_cpu.sh
# shellcheck source=/dev/null
[ -n "${VIRTUAL_ENV:-}" ] || source .venv/bin/activate

say "2/4 the toy task: two-digit addition, a tokenizer of characters, a Qwen2 model with random weights"
[ -d runs/toy/model ] || python tools/make_toy.py --out runs/toy

launch() { torchrun --standalone --nproc-per-node 2 train_rl.py --config "$@"; }

say "3/4 warm-up: supervised fine-tuning until the model is right about half of the time"
[ -d runs/quickstart-sft/hf ] || launch configs/quickstart_sft.yaml

say "4/4 reinforcement learning: GRPO, each rank trains with Megatron-core and generates with vLLM"
launch configs/quickstart.yaml

say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
python tools/report.py runs/quickstart --before runs/quickstart-sft

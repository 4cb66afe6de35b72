#!/usr/bin/env bash
# Train a small language model on a task of several turns on two CPU cores: make the task and a model, warm the model
# up by supervised fine-tuning, and train it with GRPO. docs/agents.md has the curves.
#
#   bash tools/agent_toy.sh guess             a number in five guesses
#   bash tools/agent_toy.sh multiply          multiplication with a calculator, then without
#   bash tools/agent_toy.sh tictactoe         self-play
#   bash tools/agent_toy.sh lab               multiplication on a mixture of experts, with trainers beside generators
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
guess | tictactoe) configs=("$1") steps=150 ;;
multiply) configs=(multiply multiply_alone) steps=700 ;;
lab) configs=(lab) steps=700 ranks=4 toy=(multiply --experts 8) ;;
*) echo "usage: bash tools/agent_toy.sh guess|multiply|tictactoe|lab" >&2; exit 2 ;;
esac
task=$1

export OMP_NUM_THREADS=1 # one thread per rank; torchrun would set it too, with a long warning
# shellcheck source=/dev/null
[ -n "${VIRTUAL_ENV:-}" ] || source .venv/bin/activate
launch() { torchrun --standalone --nproc-per-node "$1" train_rl.py --config "${@:2}"; }

[ -d "runs/$task-toy/model" ] || python -m lockstep data agent-toy "${toy[@]:-$task}" --out "runs/$task-toy"
[ -d "runs/$task-warm-up/hf" ] ||
    launch 2 configs/agents/warm_up.yaml run.name="$task-warm-up" model.path="runs/$task-toy/model" \
        data.train="[runs/$task-toy/warm_up.parquet]" run.max_steps="$steps"
for config in "${configs[@]}"; do
    launch "${ranks:-2}" "configs/agents/$config.yaml"
    python -m lockstep report "runs/$config" --before "runs/$task-warm-up"
done

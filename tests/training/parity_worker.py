"""One rank of test_parity.py: the log-probs of Hugging Face, Megatron in several layouts and vLLM after a refit.

    parity_worker.py CHECKPOINT_A CHECKPOINT_B OUT ROLLOUT_TP LAYOUT [LAYOUT ...]       LAYOUT is TPxPP

Rank 0 writes the largest differences as JSON to OUT.
"""

import json
import sys

from rl.runtime.ranks import discover
from train_rl import prepare_environment

RANKS = discover()
prepare_environment(RANKS)

import torch  # noqa: E402
from megatron_groups import new_grid  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from rl.config import Config, Data, Model, Rollout, Training, resolve  # noqa: E402
from rl.data.batch import Batch  # noqa: E402
from rl.engines import build_policy  # noqa: E402
from rl.models import read_hf_config  # noqa: E402
from rl.refit.gather import check_refit, refit  # noqa: E402
from rl.rollout.engine import RolloutEngine, Sampling  # noqa: E402
from rl.rollout.exchange import exchange  # noqa: E402
from rl.runtime.session import session  # noqa: E402
from rl.training.packing import plan_minibatch  # noqa: E402
from rl.training.weights import load_hf  # noqa: E402

TEMPERATURE = 0.7
SAMPLING = Sampling(
    samples_per_prompt=2, temperature=TEMPERATURE, top_p=1.0, top_k=0, min_p=0.0, max_tokens=12, stop=(), stop_token_ids=()
)


def config_of(checkpoint: str, tp: int, pp: int, rollout_tp: int) -> Config:
    return resolve(
        Config(
            model=Model(path=checkpoint, dtype="float32"),
            data=Data(max_prompt_tokens=64),
            training=Training(tp=tp, pp=pp, micro_batch_tokens=96, head_chunk_tokens=7),
            rollout=Rollout(
                tp=rollout_tp, temperature=TEMPERATURE, max_response_tokens=64, max_concurrent_samples=4, cpu_kv_cache_mib=16
            ),
        )
    )


def random_batch(vocab_size: int) -> Batch:
    """Prompts and responses of many lengths, one response empty."""
    generator = torch.Generator().manual_seed(3)

    def tokens(length):
        return torch.randint(3, vocab_size, (length,), generator=generator).int().numpy()

    lengths = [(5, 9), (17, 1), (1, 30), (33, 0), (8, 8), (2, 64), (40, 21), (3, 3)]
    count = len(lengths)
    return Batch(
        prompt_ids=[tokens(p) for p, _ in lengths],
        response_ids=[tokens(r) for _, r in lengths],
        groups=torch.arange(count),
        truncated=torch.zeros(count, dtype=torch.bool),
    )


@torch.no_grad()
def hf_logprobs(model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, entropy and sum of squared probabilities at the response tokens, one sequence at a time: nothing packed,
    nothing padded."""
    logprobs, entropies, squares = [], [], []
    for prompt, response in zip(batch.prompt_ids, batch.response_ids):
        ids = torch.tensor([*prompt.tolist(), *response.tolist()])
        log_p = (model(ids[None]).logits[0].double() / TEMPERATURE).log_softmax(-1)[len(prompt) - 1 : -1]
        logprobs.append(log_p.gather(1, ids[len(prompt) :, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
        squares.append(log_p.exp().square().sum(-1))
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(squares)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def main(checkpoint_a: str, checkpoint_b: str, out: str, rollout_tp: str, *layouts: str) -> None:
    results = {}
    with session(RANKS) as device:
        references = [AutoModelForCausalLM.from_pretrained(c, dtype=torch.float32).eval() for c in (checkpoint_a, checkpoint_b)]
        hf = read_hf_config(checkpoint_a)
        batch = random_batch(hf["vocab_size"])
        config = config_of(checkpoint_a, 1, 1, int(rollout_tp))
        engine = RolloutEngine(checkpoint_a, config.rollout, dtype="float32", max_tokens=128, seed=1, device=device)
        for layout in layouts:
            tp, pp = map(int, layout.split("x"))
            trainer = build_policy(config_of(checkpoint_a, tp, pp, int(rollout_tp)), hf, new_grid(tp, pp), device)
            for name, checkpoint, reference in zip("ab", (checkpoint_a, checkpoint_b), references):
                load_hf(checkpoint, trainer.weight_map)
                halves = ([0, 1, 2, 3], [4, 5, 6, 7])
                plans = [plan_minibatch(batch, half, dp=trainer.grid.dp, max_tokens=96) for half in halves]
                logprobs, entropy, squares = trainer.forward(batch, plans, ("logprobs", "entropy", "sum_p_squared"))
                expected, expected_entropy, expected_squares = hf_logprobs(reference, batch)
                refit(trainer, engine)
                check_refit(trainer, engine)
                mine = engine.generate(batch.prompt_ids, SAMPLING, list(range(len(batch))))
                sampled = exchange(batch.prompt_ids, mine if engine.rank_in_replica == 0 else [], SAMPLING.samples_per_prompt, device)
                results[f"{layout} {name}"] = {
                    "megatron": difference(logprobs, expected),
                    "entropy": difference(entropy, expected_entropy),
                    "sum_p_squared": difference(squares, expected_squares),
                    "vllm": difference(sampled.rollout_logprobs, hf_logprobs(reference, sampled)[0]),
                    "sampled_tokens": int(sampled.lengths.sum()),
                }
    if RANKS.rank == 0:
        with open(out, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])

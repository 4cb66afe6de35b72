"""TRL's GRPOTrainer as a side of a comparison. The interpreter of the peer's environment runs it.

    python tools/bench_tables/trl_side.py SPEC.json

tools/bench_tables/peer.py writes the specification. A step is one generation with `updates` optimizer steps.
Each step is a line in the file of records, with the names of Lockstep's metrics.jsonl.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench_tables.sides import STEP, wait_for_turn  # noqa: E402


class TimedTrainer(GRPOTrainer):
    """Records the seconds of generation and scoring, and the lengths of the samples."""

    seconds: dict[str, float] = {}
    lengths: list[int] = []
    rewards: list[float] = []
    rates: list[float] = []
    """Learning rate of each step."""
    updates = 1

    def _timed(self, name, function, *args, **options):
        start = time.perf_counter()
        out = function(*args, **options)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        return out

    def _generate(self, *args, **options):
        out = self._timed("gen", super()._generate, *args, **options)
        self.lengths += [len(ids) for ids in out[1]]
        return out

    def _calculate_rewards(self, *args, **options):
        return self._timed("reward", super()._calculate_rewards, *args, **options)

    def _generate_and_score_completions(self, *args, **options):
        return self._timed("collect", super()._generate_and_score_completions, *args, **options)

    def create_scheduler(self, num_training_steps, optimizer=None):
        peak, rates = self.args.learning_rate, self.rates
        factor = lambda update: rates[min(update // self.updates, len(rates) - 1)] / peak  # noqa: E731
        self.lr_scheduler = LambdaLR(self.optimizer if optimizer is None else optimizer, factor)
        return self.lr_scheduler


class Turns(TrainerCallback):
    """Waits for turns, writes the records, and measures the held-out accuracy every `every` steps."""

    def __init__(self, spec, trainer, score):
        self.spec, self.trainer, self.score = spec, trainer, score
        self.tokenizer, self.start = trainer.processing_class, 0.0
        self.file = open(spec["records"], "a") if trainer.accelerator.is_main_process else None

    def on_step_begin(self, args, state, control, **_):
        number, inside = divmod(state.global_step, self.spec["updates"])
        if inside == 0:
            turn, inside = divmod(number, self.spec["steps_per_turn"])
            if inside == 0:
                wait_for_turn(1 + turn)
            self.trainer.seconds.clear()
            self.trainer.lengths.clear()
            self.trainer.rewards.clear()
            self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        number, inside = divmod(state.global_step, self.spec["updates"])
        if inside:
            return
        total, seconds = time.perf_counter() - self.start, self.trainer.seconds
        old = seconds["collect"] - seconds["gen"] - seconds["reward"]
        lengths, rewards = self.trainer.lengths, self.trainer.rewards
        record = {
            STEP: number,
            "timing_s/step": total,
            "timing_s/gen": seconds["gen"],
            "timing_s/reward": seconds["reward"],
            "timing_s/old_log_prob": old,
            "timing_s/update_actor": total - seconds["collect"],
            "response_length/mean": sum(lengths) / len(lengths),
            "response_length/max": max(lengths),
            "critic/score/mean": sum(rewards) / len(rewards),
        }
        if self.file is None:
            return
        every = self.spec["validation_every"]
        if every and number % every == 0:
            record["val-core/addition/acc/mean@1"] = self.accuracy()
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    @torch.no_grad()
    def accuracy(self):
        """Return the share of held-out problems that greedy answers solve."""
        model, tokenizer, rows = self.trainer.model, self.tokenizer, read(self.spec["test"])
        ids = tokenizer.apply_chat_template(
            rows["prompt"], add_generation_prompt=True, return_dict=True, padding=True, return_tensors="pt"
        )
        length = ids["input_ids"].shape[1]
        model.eval()
        out = model.generate(
            input_ids=ids["input_ids"],
            attention_mask=ids["attention_mask"],
            max_new_tokens=self.spec["max_tokens"],
            do_sample=False,
        )
        model.train()
        answers = tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
        pairs = zip(answers, rows["ground_truth"])
        return sum(self.score("", answer, truth) for answer, truth in pairs) / len(answers)


def read(path):
    """Return the prompts and ground truths of a parquet file."""
    rows = Dataset.from_parquet(path, cache_dir=os.environ["HF_DATASETS_CACHE"])
    truths = [entry["ground_truth"] for entry in rows["reward_model"]]
    return {"prompt": list(rows["prompt"]), "ground_truth": truths}


def load_score(path):
    """Return the reward function of a file as `score(prompt, response, ground_truth) -> float`."""
    found = importlib.util.spec_from_file_location("reward", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)

    def score(*args):
        value = module.score(*args)
        return float(value["score"] if isinstance(value, dict) else value)

    return score


def main(spec):
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    world = int(os.environ.get("WORLD_SIZE", 1))
    score = load_score(spec["reward"])

    def reward(prompts, completions, ground_truth, **_):
        texts = [completion[0]["content"] for completion in completions]
        values = [score("", text, truth) for text, truth in zip(texts, ground_truth)]
        TimedTrainer.rewards += values
        return values

    per_update = spec["samples"] // spec["updates"] // world
    accumulate = -(-per_update // spec["micro_batch"])
    config = GRPOConfig(
        output_dir=spec["directory"],
        max_steps=spec["steps"] * spec["updates"],
        per_device_train_batch_size=per_update // accumulate,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate * spec["updates"],
        num_generations=spec["samples_per_prompt"],
        max_completion_length=spec["max_tokens"],
        learning_rate=max(spec["rates"]),
        adam_beta1=spec["beta1"],
        adam_beta2=spec["beta2"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens of the batch, as objective.aggregation=token-mean
        epsilon=0.2,
        temperature=1.0,
        top_k=0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,  # TRL's default is true, which is slower
        model_init_kwargs={"dtype": "float32"},
        shuffle_dataset=spec["shuffle"],
        seed=spec["seed"],
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    TimedTrainer.rates, TimedTrainer.updates = spec["rates"], spec["updates"]
    trainer = TimedTrainer(
        model=spec["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict(read(spec["train"])),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
    )
    trainer.add_callback(Turns(spec, trainer, score))
    trainer.train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))

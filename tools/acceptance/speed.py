"""Speed and memory of every phase for the shape of Qwen2.5-1.5B with random weights, and of vLLM alone.

Samples have 512 prompt tokens and up to 1,024 answer tokens. The operations are 2 per layer parameter and
token, plus causal attention, plus the head at answer tokens. A backward pass counts twice.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.acceptance.worker import ROOT, StageTask, world

PROMPT, RESPONSE, SAMPLES = 512, 1024, 8
"""Number of tokens of a prompt, tokens of an answer, and answers of a prompt."""
if TYPE_CHECKING:
    import torch

    from rl.runtime.device import Device
    from rl.training.packing import MicroBatch

TINY: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
GIB = 1 << 30
REFIT_SECONDS = 0.2
"""Target for a refit of 3 GB on one GPU: it reads and writes 3 GB at a tenth of 3 TB/s."""
TRAIN_MFU, FORWARD_MFU = 0.45, 0.55
"""Targets for shares of the matrix rate: norms, softmax and other reads of memory take the rest."""
OF_VLLM_IN_PROCESS = 0.9
"""Target for the share of the rate of vLLM called in the same way; the record of events takes the rest."""
OF_PREDICTED = 1.1
"""Limit of the memory in use as a share of the dry run's prediction: a run that needs more may not fit."""
GIVEN_BACK = 0.9
"""Target for the share of the predicted memory that sleep and offload give back."""


def checkpoint(task: StageTask, *, shape: str = "qwen2.5-1.5b") -> Path:
    """Return the directory of the random model, which is made if it does not exist.

    shape: a folder of configs/models with the model's sizes. A rehearsal uses TINY.
    """
    import torch
    import transformers

    from tools.make_toy import build_tokenizer

    directory = task.out / "models" / task.size(shape, "speed-rehearsal")
    if not (directory / "config.json").exists():
        published = json.loads((ROOT / "configs" / "models" / shape / "config.json").read_text())
        sizes: dict[str, Any] = task.size(published, TINY)
        ids = dict(pad_token_id=0, eos_token_id=1, bos_token_id=2)
        config = transformers.Qwen2Config(**sizes | ids)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = transformers.Qwen2ForCausalLM(config).bfloat16()
        build_tokenizer().save_pretrained(directory)
        model.save_pretrained(directory)
    return directory


def save_prompts(task: StageTask, tokens: int) -> Path:
    """Write random prompts of `tokens` tokens, one per character; return the file."""
    import numpy as np

    from tools.make_toy import write_rows

    generator = np.random.default_rng(0)
    texts = ["".join(map(chr, generator.integers(97, 123, tokens - 2))) for _ in range(64)]
    path = task.out / f"prompts-{tokens}.parquet"
    write_rows(path, "random", [([{"role": "user", "content": text}], "a") for text in texts])
    return path


def _sizes(task: StageTask) -> tuple[int, int, int]:
    """Return (number of prompts, tokens of a prompt, tokens of an answer) of the generation."""
    if task.is_rehearsal:
        return 2, 16, 8
    return (8 if task.mode == "quick" else 32), PROMPT, RESPONSE


def _prompts(task: StageTask) -> list:
    import torch

    count, prompt, _ = _sizes(task)
    vocab = json.loads((checkpoint(task) / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab, (prompt,), generator=generator).int().numpy() for _ in range(count)]


def bare_vllm(task: StageTask, *, in_process: bool = False) -> None:
    """Generate the same number of samples with LLM.generate, as vLLM's documentation shows.

    in_process: as a rank calls vLLM, with a seed per sample. Otherwise with vLLM's defaults. On a CPU vLLM
    runs in this process and without compilation, as in ranks.
    """
    import os

    import torch

    prompts, (_, _, response) = [ids.tolist() for ids in _prompts(task)], _sizes(task)
    options: dict = task.size(
        dict(gpu_memory_utilization=0.5, max_num_seqs=256), dict(kv_cache_memory_bytes=64 << 20)
    )
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    if in_process or not torch.cuda.is_available():
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not torch.cuda.is_available():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        options |= dict(enforce_eager=True)
    from vllm import LLM, SamplingParams, TokensPrompt

    from rl.rollout.sampling import seed_of

    llm = LLM(
        str(checkpoint(task)), max_model_len=len(prompts[0]) + response, dtype="bfloat16", seed=1, **options
    )
    common: dict[str, Any] = dict(temperature=1.0, max_tokens=response, logprobs=0, detokenize=False)
    for call in (1, 2):  # the first one compiles and allocates
        requests = [
            TokensPrompt(prompt_token_ids=ids) for ids in prompts for _ in range(SAMPLES if in_process else 1)
        ]
        params = [
            SamplingParams(seed=seed_of(call, place, place % SAMPLES), **common)
            if in_process
            else SamplingParams(n=SAMPLES, **common)
            for place in range(len(requests))
        ]
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    task.findings.note("tokens per second", tokens / seconds, text=f"{tokens} tokens, second call")


def run(task: StageTask) -> None:
    """Measure the speed and memory of every phase."""
    with world(task) as device:
        _Speed(task, device).measure()


class _Speed:
    """The engines of a run, with measurements of time and memory."""

    def __init__(self, task: StageTask, device: "Device"):
        import torch

        from rl.config.schema import Config, Data, Model, Rollout, Training, resolve
        from rl.dry_run.estimate import estimate
        from rl.dry_run.hardware import Hardware
        from rl.engines.engines import Engines, build_policy
        from rl.engines.memory import MemorySharing
        from rl.models import read_hf_config
        from rl.rollout.engine import RolloutEngine
        from rl.rollout.vllm_model import ServedModel
        from rl.training.grid import build_grid

        self.task, self.device, self.findings = task, device, task.findings
        _, prompt, response = _sizes(task)
        path = str(checkpoint(task))
        self.hf = read_hf_config(path)
        self.config = resolve(
            Config(
                algorithm="grpo",
                model=Model(path=path, dtype="bfloat16"),
                data=Data(train=["none"], max_prompt_tokens=prompt),
                training=Training(micro_batch_tokens=task.size(16384, 128), offload="all"),
                rollout=Rollout(
                    samples_per_prompt=SAMPLES,
                    max_response_tokens=response,
                    deterministic=True,
                    cpu_kv_cache_mib=16,
                ),
            )
        )
        total = torch.cuda.get_device_properties(0).total_memory / GIB if device.is_cuda else 80.0
        self.predicted = estimate(self.config, 1, Hardware(gpu_memory_gib=total)).memory
        self.rate = _matrix_rate(task, device)
        self.findings.note("bfloat16 matrix rate", self.rate / 1e12, unit="TFLOP/s")
        grid = build_grid(tp=1, pp=1, seed=1)
        self.policy = build_policy(self.config, self.hf, grid, device)
        self.policy.offload(weights=True)
        device.release_cached_memory()
        model = ServedModel(path, "bfloat16", max_tokens=prompt + response)
        self.engine = RolloutEngine(model, self.config.rollout, seed=1, device=device)
        self.memory = MemorySharing(
            self.config, device, Engines({"policy": self.policy}, {"policy": self.engine})
        )

    def measure(self) -> None:
        """Measure sleep, training, refit and generation, in this order."""
        engine = self.predicted.engine
        assert engine is not None  # the config has no roles
        with self._freed("sleep gives back weights and cache", engine.weights + engine.cache):
            self._timed("sleep", self.engine.sleep)
        self._timed("reload the training state", self.memory.to_training)
        self._training()
        self._compare_memory("training")
        self._check_offload()
        refits: list[float] = []
        for step in (1, 2):
            start = time.perf_counter()
            self.memory.to_generation(step, lambda: self._refit(refits))
            seconds = time.perf_counter() - start
            if step == 1:
                self.memory.to_training()
        nbytes = sum(parameter.nbytes for parameter in self.engine.weights().values())
        self.findings.note("offload, wake and refit", seconds, unit="s")
        on_gpu = self.device.is_cuda
        if on_gpu:
            self.findings.at_most("refit", refits[-1], REFIT_SECONDS * nbytes / 3e9, unit="s")
        self.findings.note(
            "refit bandwidth", nbytes / refits[-1] / 1e9, unit="GB/s", text=f"{nbytes / 1e9:.2f} GB"
        )
        self._generation()
        self._compare_memory("generation")

    def _training(self) -> None:
        """Measure the log-prob pass and the update on samples that share no prompt."""
        import numpy as np
        import torch

        from rl.data.batch import Batch
        from rl.training.micro_batch_plans import Cost, plan_minibatch

        _, prompt, response = _sizes(self.task)
        count = self.task.size(64, 8)
        generator = torch.Generator().manual_seed(1)

        def tokens(number: int) -> np.ndarray:
            return torch.randint(3, self.hf["vocab_size"], (number,), generator=generator).int().numpy()

        batch = Batch(
            prompt_ids=[tokens(prompt) for _ in range(count)],
            response_ids=[tokens(response) for _ in range(count)],
            groups=torch.arange(count),
            truncated=torch.zeros(count, dtype=torch.bool),
        )
        limit = self.config.training.micro_batch_tokens
        plan = plan_minibatch(batch, list(range(count)), dp=1, max_tokens=limit)

        def loss(micro: "MicroBatch") -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
            value = -micro.logprobs.sum() / (count * response)
            return value, {"loss": value}

        cost, length = Cost.of_model(self.hf, self.policy.weight_map.weights), prompt + response
        linear, pairs = cost.per_token * length, cost.per_pair * length * (length + 1) // 2
        work = count * (linear + cost.per_answer_token * response + pairs)
        ways: dict[str, tuple[Callable, int, float]] = {
            "log-prob pass": (lambda: self.policy.forward(batch, [plan], ("logprobs",)), 1, FORWARD_MFU),
            "update": (lambda: self.policy.update(batch, plan, loss, lr=1e-6), 3, TRAIN_MFU),
        }
        for name, (way, passes, least) in ways.items():
            way()  # compiles and allocates
            seconds = min(self._seconds(way) for _ in range(self.task.size(3, 1)))
            text = f"{count} samples of {prompt} + {response} tokens"
            self.findings.note(name, seconds, unit="s", text=text)
            share = passes * work / seconds / self.rate
            self.findings.target(
                f"{name}: share of the matrix rate", share, least, applies=self.device.is_cuda
            )

    def _check_offload(self) -> None:
        """Measure what offloading frees. Adam's moments exist only after the first update."""
        (state,) = self.predicted.stages[0].states.values()
        self.device.release_cached_memory()
        with self._freed("offload gives back the training state", state.total):
            self.policy.offload(weights=True)
            self.device.release_cached_memory()
        self.policy.reload()

    def _generation(self) -> None:
        """Measure the engine, and compare it with bare vLLM if that stage has run."""
        from rl.rollout.sampling import train_sampling

        prompts, sampling = _prompts(self.task), train_sampling(self.config)
        seeds = list(range(len(prompts)))
        self.engine.generate(prompts, sampling, seeds)
        self.engine.llm.reset_prefix_cache()
        start = time.perf_counter()
        samples = self.engine.generate(prompts, sampling, seeds)
        assert samples is not None  # this rank leads
        rate = sum(len(sample.token_ids) for sample in samples) / (time.perf_counter() - start)
        self.findings.note("generation, tokens per second", rate)
        for stage, least in (("bare-vllm-in-process", OF_VLLM_IN_PROCESS), ("bare-vllm", None)):
            stored = self.task.stored(stage).get("figures", {})
            name = f"generation against {stage}"
            if "tokens per second" not in stored:
                self.findings.skip(name, f"stage {stage} has no figure of this mode in this directory")
            elif least is None:
                text = "with its defaults vLLM runs the scheduler in another process"
                self.findings.note(name, rate / stored["tokens per second"], text=text)
            else:
                share = rate / stored["tokens per second"]
                self.findings.target(name, share, least, applies=self.device.is_cuda)

    @contextmanager
    def _refit(self, seconds: list[float]) -> Iterator[None]:
        self.device.synchronize()
        start = time.perf_counter()
        yield
        self.device.synchronize()
        seconds.append(time.perf_counter() - start)
        if len(seconds) > 1:
            self._compare_memory("refit")

    def _timed(self, name: str, way: Callable) -> None:
        self.findings.note(name, self._seconds(way), unit="s")

    def _seconds(self, way: Callable) -> float:
        self.device.synchronize()
        start = time.perf_counter()
        way()
        self.device.synchronize()
        return time.perf_counter() - start

    def _used(self) -> int:
        """Return the bytes in use: of the GPU, as the driver reports; without a GPU, of this process."""
        import torch

        if self.device.is_cuda:
            free, total = torch.cuda.mem_get_info()
            return total - free
        from rl.faults.process import resident_bytes

        return resident_bytes()

    @contextmanager
    def _freed(self, name: str, claimed: float) -> Iterator[None]:
        """Compare the bytes that the body frees with `claimed`, the dry run's prediction in bytes."""
        before = self._used()
        yield
        freed, text = before - self._used(), f"of {claimed / GIB:.2f} GiB"
        if self.device.is_cuda:
            self.findings.at_least(name, freed / GIB, GIVEN_BACK * claimed / GIB, unit="GiB", text=text)
        else:
            self.findings.note(name, freed / GIB, unit="GiB", text=f"{text} (host memory)")

    def _compare_memory(self, phase: str) -> None:
        """Compare the memory in use with the dry run. torch still holds the phase's peak allocation."""
        used = self._used()
        predicted, _ = self.predicted.peak(phase)
        text = f"{used / GIB:.1f} GiB in use, {predicted / GIB:.1f} GiB predicted"
        if self.device.is_cuda:
            self.findings.at_most(f"memory in {phase}", used / predicted, OF_PREDICTED, text=text)
        else:
            self.findings.skip(f"memory in {phase}", f"needs a GPU; {text}")


def _matrix_rate(task: StageTask, device: "Device") -> float:
    """Return the best of five rates of a product of square bfloat16 matrices, in operations per second."""
    import torch

    size, repeats = task.size((8192, 20), (256, 1))
    a = torch.randn(size, size, device=device.torch, dtype=torch.bfloat16)
    seconds = []
    for _ in range(6):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            a @ a
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 * repeats / min(seconds[1:])

"""One rank of test_vision.py: a model with a vision tower in transformers, Megatron and vLLM.

    vision_worker.py CHECKPOINT_A CHECKPOINT_B OUT_DIR ENGINE VISION LAYOUT [LAYOUT ...]

ENGINE is TPxEP of generation, LAYOUT is TPxPPxEP of training. The rows have images of different sizes,
several, or none; some share a prompt. Rank 0 writes the largest differences to OUT_DIR/out.json, and what the
last layout exports to OUT_DIR/export.
"""

import functools
import io
import json
import sys
from pathlib import Path

from tests.ranks.training.megatron_groups import RANKS, new_grid  # isort: skip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from PIL import Image

from rl.checkpoint.hf import export_hf
from rl.config.adapter import Adapter
from rl.config.schema import Config, Data, Model, Optimizer, Rollout, Training, resolve
from rl.data.batch import Batch
from rl.data.images import ImageReader, image_format
from rl.data.prompts import load_prompts, load_tokenizer
from rl.engines.engines import build_policy
from rl.engines.rollout_engines import build_rollout
from rl.models import architecture, read_hf_config
from rl.models.files import as_stored
from rl.refit.refit import check_refit, refit
from rl.rollout.batches import batch_of
from rl.rollout.exchange import exchange
from rl.rollout.queue_schedule import QueueSchedule
from rl.rollout.sampling import Sampling
from rl.rollout.single_turn import SingleTurn
from rl.rollout.source import SampleSource
from rl.runtime.session import session
from rl.training.micro_batch_plans import plan_minibatch
from rl.training.weights import load_hf
from tools.hf_reference import hf_gradient

TEMPERATURE = 0.7
EPS = 1e7
SAMPLING = Sampling(2, 12, temperature=TEMPERATURE)
ROWS = (
    ([(56, 84)], "what is <image>?"),
    ([], "no <image> here"),
    ([(28, 28), (112, 84), (56, 56)], "<image><image> and <image>"),
    ([(84, 56)], "<image>"),
    ([], "text"),
)
"""Height and width of the images of each prompt, and its text."""
RESPONSES = ((0, 9), (0, 5), (1, 4), (2, 7), (2, 7), (3, 1), (3, 0), (4, 6))
"""Prompt and length of each response."""


def config_of(
    checkpoint: str, layout: str, engine: str, *, vision: str = "frozen", adapter: Adapter | None = None
) -> Config:
    optimizer = Optimizer(lr=EPS, eps=EPS, clip_grad=0.0)
    sizes = dict(zip(("tp", "pp", "ep"), map(int, layout.split("x"))))
    rollout_tp, rollout_ep = map(int, engine.split("x"))
    return resolve(
        Config(
            model=Model(path=checkpoint, dtype="float32", vision=vision),
            data=Data(max_prompt_tokens=64, image_key="images"),
            training=Training(**sizes, micro_batch_tokens=96, head_chunk_tokens=7, optimizer=optimizer),
            adapter=adapter or Adapter(),
            rollout=Rollout(
                tp=rollout_tp,
                ep=rollout_ep,
                dp_attention=rollout_ep > rollout_tp,
                temperature=TEMPERATURE,
                max_response_tokens=64,
                max_concurrent_samples=4,
                cpu_kv_cache_mib=16,
            ),
        )
    )


def prompts_of(checkpoint: str, directory: Path) -> list:
    """Read ROWS from a file."""
    rng, rows = np.random.default_rng(0), []
    for sizes, text in ROWS:
        images = []
        for height, width in sizes:
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (height, width, 3)).astype(np.uint8)).save(file, "PNG")
            images.append({"bytes": file.getvalue(), "path": None})
        rows.append({"prompt": [{"role": "user", "content": text}], "images": images})
    path = directory / f"rows-{RANKS.rank}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    reader = ImageReader("images", image_format(checkpoint, read_hf_config(checkpoint)))
    options = dict(prompt_key="prompt", max_prompt_tokens=64, overlong="error")
    return load_prompts([path], load_tokenizer(checkpoint), images=reader, **options)


def batch_of_prompts(prompts: list, vocab_size: int) -> Batch:
    generator = torch.Generator().manual_seed(3)
    return Batch(
        prompt_ids=[prompts[number].token_ids for number, _ in RESPONSES],
        response_ids=[
            torch.randint(10, vocab_size, (length,), generator=generator).int().numpy()
            for _, length in RESPONSES
        ],
        groups=torch.tensor([number for number, _ in RESPONSES]),
        truncated=torch.zeros(len(RESPONSES), dtype=torch.bool),
        prompts=prompts,
    )


def hf_logprobs(model, batch: Batch, *, by_place: bool = False) -> torch.Tensor:
    """Log-probs of the response tokens by transformers, float64 [T]; nothing is packed.

    by_place: merge by the images' places. transformers merges at every token of images, generated ones too.
    """
    found = []
    for group, prompt, response in zip(batch.groups.tolist(), batch.prompt_ids, batch.response_ids):
        images = batch.prompts[group].images
        ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        options: dict = {}
        if images:
            kinds = torch.zeros_like(ids)
            for image in images:
                kinds[0, image.offset : image.offset + image.num_tokens] = 1
            patches = torch.from_numpy(np.concatenate([im.format.patches(im.pixels) for im in images]))
            grids = torch.tensor([(1, *image.grid) for image in images])
            options = dict(pixel_values=patches, image_grid_thw=grids, mm_token_type_ids=kinds)
        model.model.rope_deltas = None
        if images and by_place:
            outputs = model.model.visual(patches, grid_thw=grids)
            embeddings, mask = model.get_input_embeddings()(ids), kinds.bool()
            embeddings[mask] = outputs.pooler_output
            positions, _ = model.model.get_rope_index(ids, kinds, grids)
            deep = getattr(outputs, "deepstack_features", None)
            more = {} if deep is None else dict(visual_pos_masks=mask, deepstack_visual_embeds=deep)
            text = model.model.language_model
            hidden = text(inputs_embeds=embeddings, position_ids=positions, **more).last_hidden_state
            logits = model.lm_head(hidden)
        else:
            logits = model(ids, **options).logits
        log_p = (logits[0].double() / TEMPERATURE).log_softmax(-1)[len(prompt) - 1 : -1]
        found.append(log_p.gather(1, ids[0, len(prompt) :, None])[:, 0])
    return torch.cat(found)


def build_trainer(config: Config, hf: dict, device):
    training = config.training
    return build_policy(config, hf, new_grid(training.tp, training.pp, training.ep), device)


def logprobs_of(trainer, batch: Batch, *parts: list[int]) -> torch.Tensor:
    """Log-probs of the response tokens by the trainer; each part of the samples is a mini-batch."""
    plans = [plan_minibatch(batch, part, dp=trainer.grid.dp, max_tokens=96) for part in parts]
    return trainer.forward(batch, plans, ("logprobs",))[0]


def sampled_by(engine, prompts: list, device) -> Batch:
    """Two samples of each prompt."""
    queue = engine.queue(len(prompts))
    schedule = QueueSchedule(prompts, SAMPLING, list(range(len(prompts))), queue=queue)
    source = SampleSource(schedule, SingleTurn(SAMPLING, capacity=4))
    assert engine.run(source if engine.leads else None, SAMPLING)
    samples = exchange(schedule.samples if engine.leads else [], device)
    return batch_of(samples, [p.token_ids for p in prompts], prompts=prompts, samples_per_prompt=2)


def gradient_of(trainer, batch: Batch) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradient of the sum of log-probs, from an optimizer step that is gradient descent, and the error by
    which the weights round it."""
    in_files = functools.partial(as_stored, trainer.weight_map.weights)
    before = {name: tensor.clone() for name, tensor in in_files(trainer.full_weights())}
    plan = plan_minibatch(batch, list(range(len(batch))), dp=trainer.grid.dp, max_tokens=96)

    def minus_logprobs(micro):
        loss = -micro.logprobs.sum()
        return loss, {"loss": loss}

    trainer.update(batch, plan, minus_logprobs, lr=EPS)
    after = dict(in_files(trainer.full_weights()))
    eps = torch.finfo(torch.float32).eps
    rounding = {name: float(tensor.norm()) * eps for name, tensor in after.items()}
    return {name: tensor - before[name] for name, tensor in after.items()}, rounding


def main(checkpoint_a, checkpoint_b, out_dir, generates, vision, *layouts) -> None:
    results: dict = {}
    with session(RANKS) as device:
        hf = read_hf_config(checkpoint_a)
        architecture(hf).check(hf)
        prompts = prompts_of(checkpoint_a, Path(out_dir))
        batch = batch_of_prompts(prompts, hf["vocab_size"])
        references, expected = {}, {}
        if RANKS.rank == 0:
            kind = getattr(transformers, hf["architectures"][0])
            for name, checkpoint in (("a", checkpoint_a), ("b", checkpoint_b)):
                references[name] = kind.from_pretrained(checkpoint, dtype=torch.float32).eval()
                expected[name] = hf_logprobs(references[name], batch)
            gradient = hf_gradient(references["b"], expected["b"], Path(out_dir, "gradient"))
        engine = build_rollout(config_of(checkpoint_a, "1x1x1", generates), device)
        for layout in layouts:
            config = config_of(checkpoint_a, layout, generates, vision=vision)
            trainer = build_trainer(config, hf, device)
            for name, checkpoint in (("a", checkpoint_a), ("b", checkpoint_b)):
                load_hf(checkpoint, trainer.weight_map)
                found = logprobs_of(trainer, batch, [0, 1, 2, 3], [4, 5, 6, 7])
                sides: dict = {}
                refit(trainer, engine)
                check_refit(trainer, engine)
                sampled = sampled_by(engine, prompts, device)
                again = logprobs_of(trainer, sampled, list(range(len(sampled))))
                sides["gap"] = float((again - sampled.rollout_logprobs).abs().max())
                moved = trainer.parts.metrics(device.torch)
                sides["bytes"] = moved["perf/held_bytes_received"], moved["perf/held_bytes_planned"]
                if RANKS.rank > 0:
                    continue
                sides["megatron"] = float((found.double() - expected[name]).abs().max())
                sides["largest"] = float(expected[name].abs().max())
                with torch.no_grad():
                    of_hf = hf_logprobs(references[name], sampled, by_place=True)
                sides["vllm"] = float((sampled.rollout_logprobs.double() - of_hf).abs().max())
                sides["sampled_tokens"] = int(sampled.lengths.sum())
                results[f"{layout} {name}"] = sides
            if layout == layouts[-1]:
                export_hf(trainer, checkpoint_b, f"{out_dir}/export")
            found, rounding = gradient_of(trainer, batch)
            if RANKS.rank == 0:
                # transformers exchanges rows and columns of experts when it loads them, and not back.
                expected_of = {n: g if g.shape == found[n].shape else g.mT for n, g in gradient.items()}
                towers = {name for name in gradient if "visual." in name}
                learned = gradient.keys() - (towers if vision == "frozen" else set())
                differences = {
                    n: (float((found[n] - expected_of[n]).norm()) - rounding[n])
                    / (float(expected_of[n].norm()) + 1e-3)
                    for n in learned
                }
                worst = max(differences, key=lambda n: differences[n])
                results[f"{layout} b"] |= {
                    "gradient": differences[worst],
                    "worst_gradient": worst,
                    "tower_moved": max(float(found[n].norm()) for n in towers),
                }
    if RANKS.rank == 0:
        Path(out_dir, "out.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])

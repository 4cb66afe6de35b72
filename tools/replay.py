"""Repeat the generation of a step from its stored event log, and compare token ids and log-probs bitwise.

    torchrun --nproc-per-node 2 -m lockstep samples replay runs/agent 12
    torchrun --nproc-per-node 2 -m lockstep samples replay runs/agent 12 --weights models/step-11

A run with environments and `agents.order=arrival` stores the log of each generation in RUN_DIR/events. The
weights come from the checkpoint of the step before (for step 1, from the model itself), or from a Hugging
Face checkpoint (--weights). With `roles` a step has all that generators sampled with these weights, for its
batch or for later ones. Environments are not needed, because their answers are in the log. Use the number of
ranks of the run, or another one that its layout allows; the replicas share the logs. The exit code is 0 if
every completion is identical, 1 if not, and 2 for wrong arguments.
"""

import argparse
import contextlib
import sys
from dataclasses import replace
from pathlib import Path

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.command_line import make_parser
from rl.runtime.ranks import Ranks, discover
from train_rl import leave, prepare_environment


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="directory of the run")
    add("step", type=int, help="step to repeat")
    add("--weights", help="Hugging Face checkpoint with the weights of the step")
    args = parser.parse_args(argv)
    ranks = discover()
    prepare_environment(ranks)
    try:
        return replay(ranks, args)
    except ValueError as error:
        if ranks.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


def replay(ranks: Ranks, args: argparse.Namespace) -> int:
    """Repeat a step; return the exit code. Collective over the world.

    Raises ValueError for wrong arguments.
    """
    from rl.config import wing
    from rl.run_directory.status import refuse_missing
    from rl.runtime.session import session

    refuse_missing(args.run_dir)
    logs = wing.door_of("agents", "logs", needed_by=f"RUN_DIR={args.run_dir}")
    with session(ranks) as device:
        # Here, because a session silences the libraries' warnings.
        from rl.checkpoint.directory import complete
        from rl.checkpoint.store import CheckpointStore
        from rl.config.options import load as load_config
        from rl.config.reward import Reward
        from rl.config.roles import Roles
        from rl.config.schema import Config
        from rl.engines.engines import build_engines, finish_imports
        from rl.engines.inputs import Inputs
        from rl.engines.memory import MemorySharing
        from rl.run_directory.event_files import DIRECTORY
        from rl.run_directory.record import config_of_step
        from rl.runtime.collectives import gather_objects
        from rl.sandbox.private_directory import refuse_untrusted
        from rl.training.grid import build_grid

        refuse_untrusted(args.run_dir)  # its config may name code
        config = load_config(Config, config_of_step(args.run_dir, args.step))
        run = replace(config.run, dir=args.run_dir)  # it may have moved
        model = replace(config.model, path=args.weights or config.model.path)
        config = replace(config, run=run, model=model, reward=Reward(), roles=Roles())
        files = sorted(Path(args.run_dir, DIRECTORY, f"step_{args.step}").glob("*.events"))
        if not files:
            raise ValueError(
                f"RUN_DIR={args.run_dir} has no event log of step {args.step}; name a step of a run with the "
                "section agents and agents.order=arrival, which stores one."
            )
        rollout = replace(config.rollout, async_scheduling=logs.load(files[0]).is_async)
        config = replace(config, rollout=rollout)
        store = CheckpointStore(config)
        saved = {saved.step: saved for saved in complete(store.directory)}.get(args.step - 1)
        if saved is None and args.step > 1 and not args.weights:
            raise ValueError(
                f"{store.directory} has no checkpoint of step {args.step - 1}; name the step after a "
                "checkpoint (checkpoint.every), or pass the weights with --weights."
            )
        inputs = Inputs(config, ranks.world_size)
        finish_imports(config, generate=True)
        training = config.training
        grid = build_grid(
            tp=training.tp,
            pp=training.pp,
            cp=training.cp,
            ep=training.ep,
            etp=training.expert_tp,
            vpp=training.vpp,
            seed=0,
        )
        engines = build_engines(config, inputs, grid, device, generate=True)
        if saved is not None and not args.weights:
            store.load_weights(saved, {"policy": engines.policy})
        MemorySharing(config, device, engines).to_generation(args.step, contextlib.nullcontext)
        engine, found = engines.rollout, []
        assert engine is not None  # generate=True builds it
        for file in files[engine.replica :: engine.num_replicas]:
            log = logs.load(file)
            source = logs.Replay(log)
            engine.llm.reset_prefix_cache()
            is_whole = engine.run(source if engine.leads else None, log.sampling)
            if engine.leads:
                found.append((file.name, is_whole, len(log.completions), source.num_tokens, source.different))
        results = [result for own in gather_objects(found) for result in own]
        engines.close()
    if ranks.rank == 0:
        for name, is_whole, count, num_tokens, different in sorted(results):
            state = "identical" if is_whole and not different else "DIFFERENT"
            first = f", the first one {different[0]}" if different else ""
            print(f"{name}: {count} completions, {num_tokens} tokens: {state}", end="")
            print(f" ({len(different)} completions{first})" if state == "DIFFERENT" else "")
    return int(any(different or not is_whole for _, is_whole, _, _, different in results))


if __name__ == "__main__":
    leave(main())

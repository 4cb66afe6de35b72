"""Command lines in the form of verl's examples, the configs made of them, and their dry runs."""

import textwrap
from pathlib import Path

import pytest

from rl.config.schema import load_config
from rl.dry_run import command
from tests.spawn import ROOT
from tools import from_verl

DATA = "data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet"
GRPO = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8"
SCRIPTS = {
    "ppo": f"""
        set -x
        python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae {DATA} \\
            data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=512 \\
            data.filter_overlong_prompts=True data.truncation='error' \\
            actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat \\
            actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
            actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \\
            actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.name=vllm \\
            critic.optim.lr=1e-5 critic.model.path=deepseek-ai/deepseek-llm-7b-chat \\
            critic.ppo_micro_batch_size_per_gpu=32 trainer.logger='["console","wandb"]' \\
            trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.total_epochs=15 $@
        """,
    "grpo": f"""
        python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {DATA} \\
            data.train_batch_size=1024 data.max_response_length=1024 \\
            actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.use_kl_loss=True \\
            actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32 \\
            actor_rollout_ref.actor.kl_loss_type=low_var_kl+ actor_rollout_ref.rollout.n=5 \\
            actor_rollout_ref.ref.fsdp_config.param_offload=True trainer.total_epochs=15 $@
        """,
    "dapo": """
        set -xeuo pipefail
        length=$((1024 * 20)) NNODES=${NNODES:-16} MODEL=${MODEL:-"${HOME}/models/Qwen2.5-32B"}
        offload=True
        ray job submit --no-wait --working-dir "${PWD}" -- python3 -m recipe.dapo.main_dapo \\
            data.train_files="${HOME}/dapo-math-17k.parquet" data.val_files="['a.parquet','b.parquet']" \\
            data.truncation='left' data.max_prompt_length=2048 data.max_response_length=${length} \\
            data.gen_batch_size=1536 data.train_batch_size=512 algorithm.adv_estimator=grpo \\
            algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 \\
            algorithm.filter_groups.metric=acc actor_rollout_ref.model.path="${MODEL}" \\
            actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.clip_ratio_c=10.0 \\
            actor_rollout_ref.actor.use_dynamic_bsz=True \\
            actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((2048 + length)) \\
            actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \\
            actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 \\
            actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
            actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
            actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.n=1 \\
            actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \\
            actor_rollout_ref.rollout.val_kwargs.top_p=0.7 reward_model.reward_manager=dapo \\
            +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \\
            +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096 trainer.nnodes="${NNODES}" \\
            +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 trainer.resume_mode=auto "$@"
        """,
    "deepseek": f"""
        PP=16 EP=16
        python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_megatron_trainer' \\
            algorithm.adv_estimator=grpo {DATA} data.train_batch_size=512 data.max_prompt_length=2048 \\
            data.max_response_length=4096 actor_rollout_ref.model.path=dsv3 \\
            actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
            actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.rollout.n=4 \\
            actor_rollout_ref.rollout.tensor_model_parallel_size=32 \\
            actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \\
            actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$PP \\
            actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=$PP \\
            actor_rollout_ref.actor.megatron.expert_model_parallel_size=$EP \\
            actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \\
            +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
            actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2 \\
            trainer.nnodes=32 trainer.total_epochs=100 $@
        """,
}
SCRIPTS["array"] = """
        set -xeuo pipefail
        DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
        ulimit -n 1048576
        cd /opt/not/here
        EXTRA=()
        case "${DEVICE}" in
            gpu)
                case "${MACHINE:-}" in
                    gb200) GPUS=4 ;;
                    *)
                        GPUS=8
                        EXTRA+=(
                            actor_rollout_ref.actor.megatron.context_parallel_size=2
                            actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
                        ) ;;
                esac ;;
            npu) GPUS=16 ;;
        esac
        MODEL=(
            actor_rollout_ref.model.path="${HDFS_ROOT}/Qwen3-30B-A3B"
            actor_rollout_ref.model.lora.rank=32 actor_rollout_ref.model.lora.alpha=64
            actor_rollout_ref.model.lora.target_modules='["linear_qkv","linear_proj"]'
        )
        ACTOR=(
            actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.use_dynamic_bsz=True
            actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12000
            actor_rollout_ref.actor.megatron.router_replay.mode=R3
        )
        LAUNCH=(uv run --frozen --extra vllm python3)
        "${LAUNCH[@]}" -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=grpo \\
            data.train_files="['$HOME/a.parquet']" data.train_batch_size=128 "${MODEL[@]}" "${ACTOR[@]}" \\
            actor_rollout_ref.actor.megatron.expert_model_parallel_size=4 actor_rollout_ref.rollout.n=8 \\
            actor_rollout_ref.rollout.tensor_model_parallel_size=4 reward.reward_manager.name=dapo \\
            +reward.reward_kwargs.overlong_buffer_cfg.enable=True \\
            +reward.reward_kwargs.overlong_buffer_cfg.len=128 trainer.n_gpus_per_node=${GPUS} \\
            trainer.nnodes=2 trainer.total_epochs=2 "${EXTRA[@]}" "$@"
        """
SCRIPTS["distill"] = f"""
        python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {DATA} data.train_batch_size=128 \\
            actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
            actor_rollout_ref.rollout.n=1 distillation.enabled=True trainer.total_epochs=1 \\
            distillation.teacher_models.teacher_model.model_path=Qwen/Qwen2.5-7B-Instruct \\
            distillation.distillation_loss.loss_mode=forward_kl_topk \\
            distillation.distillation_loss.topk=64 distillation.distillation_loss.use_task_rewards=False "$@"
        """
SCRIPTS["sft"] = """
        if [ "$#" -lt 2 ]; then echo "Usage: $0 <nproc_per_node> <save_path>"; exit 1; fi
        nproc=$1 save=$2
        shift 2
        torchrun --standalone --nnodes=1 --nproc_per_node=$nproc -m verl.trainer.sft_trainer \\
            data.train_files=$HOME/data/gsm8k/train.parquet data.train_batch_size=64 data.max_length=2048 \\
            data.messages_key=messages optim.lr=1e-4 engine=fsdp engine.ulysses_sequence_parallel_size=2 \\
            model.path=Qwen/Qwen3-8B trainer.default_local_dir=$save trainer.total_epochs=2 "$@"
        """
RUNS = {
    "array": (
        "qwen3-30b-a3b",
        16,
        dict(
            model__path="HDFS_ROOT/Qwen3-30B-A3B",
            training__cp=2,
            training__ep=4,
            training__micro_batch_tokens=12000,
            training__router_replay="engine",
            adapter__kind="lora",
            adapter__alpha=64.0,
            adapter__targets=["q_proj", "k_proj", "v_proj", "o_proj"],
            reward__overlong_buffer_tokens=128,
            run__max_steps=2 * (7473 // 128),
        ),
    ),
    "distill": (
        "qwen2.5-7b",
        8,
        dict(
            algorithm="distill",
            teacher__path="Qwen/Qwen2.5-7B-Instruct",
            teacher__divergence="forward_kl",
            teacher__top_k=64,
        ),
    ),
    "sft": (
        "qwen3-8b",
        8,
        dict(
            algorithm="sft", data__messages_key="messages", data__prompts_per_step=64, run__dir="checkpoints"
        ),
    ),
    "ppo": ("llama-3.1-8b", 8, dict(algorithm="ppo", run__max_steps=105, rollout__tp=4)),
    "grpo": (
        "qwen3-8b",
        8,
        dict(objective__kl_estimator="k3+", rollout__samples_per_prompt=5, adapter__rank=64),
    ),
    "dapo": (
        "qwen2.5-32b",
        128,
        dict(
            algorithm="dapo",
            data__val=["a.parquet", "b.parquet"],
            dynamic_sampling__prompts_per_round=1536,
            objective__dual_clip=10.0,
            validation__top_p=0.7,
            reward__overlong_buffer_tokens=4096,
            training__micro_batch_tokens=22528 * 8,
        ),
    ),
    "deepseek": ("deepseek-v3", 256, dict(training__pp=16, training__ep=16, training__recompute="full")),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_verl_script_becomes_a_config_that_fits(tmp_path, capsys, name):
    shape, world, expected = RUNS[name]
    script, out = tmp_path / "run.sh", tmp_path / "ours.yaml"
    script.write_text(textwrap.dedent(SCRIPTS[name]))
    options = ["--train-rows", "7473", "--out", str(out)]
    rate = "optim.lr=2e-6" if name == "sft" else "actor_rollout_ref.actor.optim.lr=2e-6"
    assert from_verl.main([str(script), *options, rate]) == 0
    config = load_config(str(out))
    for key, value in expected.items():
        section, _, field = key.rpartition("__")
        assert getattr(getattr(config, section) if section else config, field) == value, key
    assert config.training.optimizer.lr == 2e-6
    shape_file = str(ROOT / "configs" / "models" / shape / "config.json")
    options = ["--world-size", str(world), "--model-shape", shape_file]
    assert command.main(["--config", str(out), "--dry-run", *options]) == 0, capsys.readouterr()


def test_a_relative_path_is_that_of_the_caller(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.sh").write_text(textwrap.dedent(SCRIPTS["grpo"]))
    monkeypatch.chdir(tmp_path)
    assert from_verl.main(["run.sh"]) == 0
    assert "samples_per_prompt: 5" in capsys.readouterr().out


def test_settings_without_a_counterpart_are_listed(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(textwrap.dedent(SCRIPTS["dapo"]))
    assert from_verl.main([str(script), "--out", str(tmp_path / "ours.yaml"), "trainer.x=1"]) == 0
    text = capsys.readouterr().err
    missing, needless = text.partition("no counterpart:")[2].split("not needed:")
    assert [line.split("=")[0].strip() for line in missing.strip().splitlines()] == ["trainer.x"]
    assert needless.split() and "actor_rollout_ref.actor.fsdp_config.param_offload" in needless.split()
    assert "run.max_steps is not set" in text and "16 x 8 GPUs" in text


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"trainer: [", b""])
def test_a_damaged_yaml_is_named(tmp_path, capsys, damage):
    config = tmp_path / "ppo.yaml"
    config.write_bytes(damage)
    assert from_verl.main([str(config)]) == 2
    assert str(config) in capsys.readouterr().err


def test_a_yaml_with_references_and_overrides_is_read(tmp_path, capsys):
    given = tmp_path / "verl.yaml"
    given.write_text(
        "algorithm: {adv_estimator: rloo, kl_penalty: kl, use_kl_in_reward: true}\n"
        "actor_rollout_ref: {actor: {optim: {lr: 1e-6}, rollout_n: '${x.y}'}, rollout: {n: 4}}\n"
        "data: {train_files: [a.parquet]}\n"
    )
    out = tmp_path / "ours.yaml"
    assert from_verl.main([str(given), "--out", str(out), "++algorithm.kl_ctrl.kl_coef=0.01"]) == 0
    config = load_config(str(out))
    assert config.algorithm == "rloo" and config.objective.aggregation == "token-mean"
    assert config.objective.reward_kl.coef == 0.01 and config.training.optimizer.lr == 1e-6
    assert "no counterpart" not in capsys.readouterr().err


def test_what_verl_ignores_or_chooses_is_translated(tmp_path, capsys):
    given, out = tmp_path / "verl.yaml", tmp_path / "ours.yaml"
    actor, val = "actor_rollout_ref.actor", "actor_rollout_ref.rollout.val_kwargs"

    def translated(*settings: str):
        assert from_verl.main([str(given), "--out", str(out), *settings]) == 0
        return load_config(str(out)), capsys.readouterr().err

    given.write_text("algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 8}}\n")
    config, notes = translated(f"{actor}.clip_ratio=0.4", f"{val}.do_sample=False", f"{val}.n=4")
    # verl's own clip_ratio_low and clip_ratio_high of 0.2 come first, and temperature 0 is greedy.
    assert (config.objective.clip_low, config.objective.clip_high) == (0.2, 0.2)
    assert "clip_ratio=0.4 has no effect in verl" in notes and "val_kwargs.n=4: greedy responses" in notes
    assert config.validation.greedy and config.validation.samples_per_prompt == 0
    config, notes = translated(
        f"{actor}.clip_ratio=0.4", f"{actor}.clip_ratio_low=null", f"{val}.temperature=0.6", f"{val}.n=4"
    )
    assert (config.objective.clip_low, config.objective.clip_high) == (0.4, 0.2)
    assert (config.validation.samples_per_prompt, config.validation.temperature) == (4, 0.6)
    assert "do_sample=False has no effect in verl" in notes
    filtering = "algorithm.adv_estimator=gae", "+algorithm.use_pf_ppo=True", "actor_rollout_ref.rollout.n=5"
    config, notes = translated(*filtering, "+algorithm.pf_ppo.weight_pow=3.0")
    assert (config.objective.filtration, config.objective.filtration_power) == ("power", 3.0)
    config, notes = translated(*filtering, "+algorithm.pf_ppo.reweight_method=max_min")
    assert config.objective.filtration == "best-worst" and "in verl of the batch" in notes
    config, notes = translated("+algorithm.use_pf_ppo=True")
    assert "verl reads it with adv_estimator=gae" in notes
    config, _ = translated("actor_rollout_ref.model.lora.rank=8", f"{actor}.megatron.param_offload=True")
    assert config.adapter.alpha == 32.0
    config, _ = translated("actor_rollout_ref.model.lora_rank=8")
    assert config.adapter.alpha == 16.0
    config, notes = translated("reward_model.enable=True", "reward_model.model.path=rm")
    assert config.reward.model.path == "rm" and config.reward.sources == {} and "gives 0" in notes
    config, _ = translated("+data.apply_chat_template_kwargs.enable_thinking=False")
    assert config.data.template_kwargs == {"enable_thinking": False}
    for name in ("Qwen2.5-VL-7B-Instruct", "Qwen3-VL-8B-Instruct"):
        config, _ = translated(f"actor_rollout_ref.model.path={name}", "data.train_files=a.parquet")
        assert (config.data.image_key, config.model.vision) == ("images", "train")  # verl's defaults
    sees, excluded = (
        f"actor_rollout_ref.model.path={name}",
        "actor_rollout_ref.model.exclude_modules=.*visual.*",
    )
    for more, noted in ((), True), ((excluded,), False):
        config, notes = translated(sees, "actor_rollout_ref.model.lora_rank=8", *more)
        assert (config.adapter.kind, config.model.vision) == ("lora", "frozen")
        assert ("verl adapts layers of the vision tower" in notes) == noted
        assert "exclude_modules" not in notes
    geometry = config.reward.sources["hiyouga/geometry3k"]
    assert [each["weight"] for each in geometry] == [0.9, 0.1]


def test_tools_and_interactions_run_as_verls_classes(tmp_path, monkeypatch, capsys):
    script, out, file = tmp_path / "run.sh", tmp_path / "ours.yaml", tmp_path / "tools.yaml"
    turns = "actor_rollout_ref.rollout.multi_turn"
    script.write_text(
        f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {DATA} {turns}.enable=True "
        "actor_rollout_ref.rollout.n=4 "
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B actor_rollout_ref.model.custom_chat_template={{x}} "
        "actor_rollout_ref.rollout.over_sample_rate=0.1 data.sampler.class_name=RandomCurriculumSampler "
        "data.sampler.class_path=pkg://tests.utils.dataset.test_create_rl_sampler_on_cpu data.shuffle=False\n"
    )
    file.write_text("tools: [{class_name: verl.tools.gsm8k_tool.Gsm8kTool, config: {type: native}}]\n")
    options = [str(script), "--out", str(out), "--train-rows", "7473"]
    assert from_verl.main(options) == 2
    assert "multi_turn.enable=True without tool_config_path" in capsys.readouterr().err
    tools = f"{turns}.tool_config_path={file}"
    assert from_verl.main([*options, tools, f"{turns}.max_user_turns=3"]) == 0
    config, notes = load_config(str(out)), capsys.readouterr().err
    assert config.agents.environment == "rl.features.agents.integrations.verl:Tools"
    assert (config.agents.kwargs, config.agents.max_turns) == ({"tools": str(file)}, 4)
    assert config.data.shuffle and "data.shuffle=True, because the sampler" in notes
    assert "data.sampler" not in notes and "agent_name=tool_agent" in notes
    assert config.model.path == "Qwen/Qwen2.5-3B-chat" and "Copy Qwen/Qwen2.5-3B to" in notes
    assert "over_sample_rate=0.1: verl 0.7 and later do not read it" in notes
    agent = "actor_rollout_ref.rollout.agent.default_agent_loop"
    for refused, why in (
        ("data.sampler.class_path=mine.py", "a sampler of verl has to be written"),
        (f"{agent}=single_turn_agent", "only tool_agent runs as it is"),
        (f"{turns}.function_tool_path=f.py", "a function of verl has to be written"),
        ("critic.model.custom_chat_template=x", "the tokenizer is the policy's"),
    ):
        assert from_verl.main([*options, tools, refused]) == 2 and why in capsys.readouterr().err
    images = f"{turns}.interaction_config_path=i.yaml", "data.image_key=images"
    assert from_verl.main([*options, *images]) == 2 and "cannot read images" in capsys.readouterr().err
    assert from_verl.main([*options, f"{tools}.old", f"{agent}=tool_agent"]) == 0
    notes = capsys.readouterr().err
    assert "tools.yaml.old is not here and was not read" in notes and agent not in notes
    more = f"{turns}.interaction_config_path=i.yaml", f"{turns}.max_tool_response_length=99"
    assert from_verl.main([*options, tools, *more, f"{turns}.max_parallel_calls=2"]) == 0
    config = load_config(str(out))
    assert config.agents.environment.endswith(":ToolAgent") and config.agents.max_turns == 512
    expected = {"tools": str(file), "interactions": "i.yaml", "cut_to": 99, "max_calls": 2}
    assert config.agents.kwargs == expected
    file.write_text("tools: [{class_name: verl.tools.search_tool.SearchTool}]\n")
    capsys.readouterr()
    assert from_verl.main([*options, tools]) == 2
    assert "SearchTool is an actor of Ray" in capsys.readouterr().err
    file.write_text("tools: [{name: a}]\n")
    assert from_verl.main([*options, tools]) == 2 and "names no tools" in capsys.readouterr().err


def test_a_path_from_a_variable_that_is_never_set_has_its_name(tmp_path, capsys):
    script, out = tmp_path / "run.sh", tmp_path / "ours.yaml"
    script.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$train_path "
        "trainer.experiment_name=a$never actor_rollout_ref.model.path=Qwen/Qwen2.5-3B "
        "data.train_batch_size=256 actor_rollout_ref.rollout.n=4"
    )
    assert from_verl.main([str(script), "--out", str(out), "--train-rows", "512"]) == 0
    config, notes = load_config(str(out)), capsys.readouterr().err
    assert config.data.train == ["train_path"] and "train_path=train_path was assumed" in notes
    assert config.run.name == "a" and "never=" not in notes
    text = script.read_text().replace("data.train_files=$train_path", "$files")
    files = "files=data.train_files=$train_path; case $- in *u*) files= ;; esac\n"
    script.write_text(files + text)  # with bash -u there is no such setting
    assert from_verl.main([str(script), "--out", str(out), "--train-rows", "512"]) == 0
    assert load_config(str(out)).data.train == []


def test_a_chat_template_of_supervised_fine_tuning_is_noted(tmp_path, capsys):
    script, out = tmp_path / "run.sh", tmp_path / "ours.yaml"
    start = "python3 -m verl.trainer.sft_trainer data.train_files=a.parquet data.messages_key=messages "
    script.write_text(f"{start} model.path=m model.custom_chat_template=x\n")
    assert from_verl.main([str(script), "--out", str(out), "--train-rows", "512"]) == 0
    assert load_config(str(out)).model.path == "m-chat"
    assert "write model.custom_chat_template into" in capsys.readouterr().err


def test_a_layout_that_does_not_fit_is_changed(tmp_path, capsys):
    script, out = tmp_path / "run.sh", tmp_path / "ours.yaml"
    script.write_text(
        f"python3 -m verl.trainer.main_ppo {GRPO} {DATA} data.train_batch_size=64 "
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-32B data.max_response_length=4096 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_dynamic_bsz=True "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 trainer.nnodes=${NODES} "
    )
    assert from_verl.main([str(script), "--out", str(out), "--train-rows", "640", "trainer.nnodes=1"]) == 0
    notes = capsys.readouterr().err
    assert "NODES=1 was assumed" not in notes  # bash leaves an unset variable empty without set -u
    assert "verl's layout does not fit 8 GPUs of 80 GiB" in notes
    assert command.main(["--config", str(out), "--dry-run", "--world-size", "8"]) == 0, capsys.readouterr()


def test_every_script_of_a_checkout_is_counted(tmp_path, capsys):
    folder = tmp_path / "examples" / "grpo"
    folder.mkdir(parents=True)
    start = f"python3 -m verl.trainer.main_ppo {GRPO} {DATA} data.train_batch_size=256 "
    large = "actor_rollout_ref.rollout.tensor_model_parallel_size=8 actor_rollout_ref.model.path=Qwen/"
    scripts = {
        "fits": f"{start} actor_rollout_ref.model.path=Qwen/Qwen3-8B trainer.nnodes=2",
        "large": f"{start} {large}Qwen2.5-72B-Instruct trainer.nnodes=1 trainer.n_gpus_per_node=8",
        "large_999gb": f"{start} {large}Qwen2.5-72B-Instruct trainer.nnodes=1 trainer.n_gpus_per_node=8",
        "mine": f"{start} actor_rollout_ref.model.path=mine",
        "echo": "echo hello",
    }
    for name, text in scripts.items():
        (folder / f"{name}.sh").write_text(text + "\n")
    out = tmp_path / "out"
    assert from_verl.main(["--all", str(tmp_path), "--out", str(out), "--train-rows", "640"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "did not start verl's trainer" in lines[0] and lines[1] == "examples/grpo/fits.sh: 16 GPUs"
    assert "more than the 80 GiB of a GPU" in lines[2] and lines[3].endswith("large_999gb.sh: 8 GPUs")
    assert "model.path=mine has no config.json" in lines[4] and lines[5].startswith("2 of 5 scripts")
    assert {file.name for file in out.iterdir()} == {"grpo__fits.yaml", "grpo__large_999gb.yaml"}
    assert from_verl.main(["--all", str(out)]) == 2


def test_generation_alone_is_a_mode_of_the_run(tmp_path, capsys):
    script, out = tmp_path / "run.sh", tmp_path / "ours.yaml"
    script.write_text(
        "python3 -m verl.trainer.main_generation trainer.nnodes=1 data.path=gsm8k/test.parquet "
        "data.prompt_key=prompt data.n_samples=5 data.output_path=out.parquet model.path=Qwen/Qwen3-8B "
        "rollout.temperature=1.0 rollout.top_p=0.7 rollout.prompt_length=2048 rollout.response_length=1024 "
        "rollout.tensor_model_parallel_size=2\n"
    )
    assert from_verl.main([str(script), "--out", str(out), "--train-rows", "1319"]) == 0
    config = load_config(str(out))
    assert (config.run.mode, config.logging.rollouts, config.run.max_steps) == ("rollout_only", "all", 11)
    assert (config.rollout.samples_per_prompt, config.rollout.top_p, config.data.shuffle) == (5, 0.7, False)
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (2048, 1024)
    assert "data.output_path=out.parquet: responses" in capsys.readouterr().err
    text = (
        script.read_text()
        .replace("main_generation", "main_generation_server")
        .replace("data.path", "data.files")
    )
    text = text.replace(" model", " actor_rollout_ref.model").replace(
        " rollout", " actor_rollout_ref.rollout"
    )
    script.write_text(
        text.replace("data.files", "data.train_files") + " actor_rollout_ref.rollout.top_k=50\n"
    )
    assert from_verl.main([str(script), "--out", str(out), "actor_rollout_ref.rollout.top_k=50"]) == 0
    assert load_config(str(out)).rollout.top_k == 0 and "does not read it" in capsys.readouterr().err
    assert command.main(["--config", str(out), "--dry-run", "--world-size", "8"]) == 0


def test_ranks_beyond_the_heads_share_the_tokens(tmp_path, capsys):
    script, out = tmp_path / "run.sh", tmp_path / "ours.yaml"
    script.write_text(
        f"python3 -m verl.trainer.main_ppo {GRPO} {DATA} data.train_batch_size=256 "
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct actor_rollout_ref.actor.use_dynamic_bsz=True "
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 trainer.nnodes=2 "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096\n"
    )
    assert from_verl.main([str(script), "--out", str(out)]) == 0
    training = load_config(str(out)).training
    assert (training.tp, training.cp, training.micro_batch_tokens) == (2, 4, 8192)
    assert "training.tp=2: the model has fewer key/value heads" in capsys.readouterr().err
    script.write_text(script.read_text().replace("2.5-3B", "3-VL-2B").replace("ulysses", "megatron.x") + "\n")
    context = "actor_rollout_ref.actor.megatron.context_parallel_size=2"
    assert from_verl.main([str(script), "--out", str(out), context]) == 0
    training = load_config(str(out)).training
    assert (training.cp, training.micro_batch_tokens) == (1, 8192)
    assert "a rank cannot divide images (context_parallel_size=2)" in capsys.readouterr().err


HOSTILE = r"""
set -euxo pipefail
run() { "$@" 2>&1 | tee "logs/$(date +%s).log"; }
join() { local IFS=,; echo "[$*]"; }
export SIZE=7B LR="1e-6"   # a comment; with 'quotes' and $(never) run
declare -A KL=([low]=0.001 [high]=0.01)
read -r -d '' LONG <<EOF || true
data.max_prompt_length=$((1 << 9))
EOF
while read -r line; do EXTRA+=("$line"); done <<'EOF'
actor_rollout_ref.rollout.temperature=0.9
actor_rollout_ref.rollout.n=8
EOF
case "${MODE:-grpo}" in g*) case "$SIZE" in *B) ADV=grpo ;; esac ;& *) : ;; esac
for i in 1 2 3; do FILES+=("'a $i.parquet'"); done
OPTS=( "data.train_files=$(join "${FILES[@]}")"   # a comment inside an array
       data.val_files='["b.parquet"]' "trainer.experiment_name='run #1'" )
trap 'echo done' EXIT
if [ -z "${NOPE:-}" ] && ! command -v nvidia-smi >/dev/null; then N=${1:-8}; fi
run env A=1 python3 -u -m verl.trainer.main_ppo \
    algorithm.adv_estimator="$ADV" "${OPTS[@]}" $LONG "${EXTRA[@]}" \
    actor_rollout_ref.actor.optim.lr=$LR actor_rollout_ref.model.path=m \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=${KL[high]} \
    trainer.n_gpus_per_node=$(( 2 ** 3 )) '+trainer.note=a=b=c' ~critic "$@"
"""


def test_the_shell_of_a_script_is_that_of_bash(tmp_path, capsys):
    script, out = tmp_path / "run.sh", tmp_path / "ours.yaml"
    script.write_text(HOSTILE)
    assert from_verl.main([str(script), "--out", str(out), "--train-rows", "1024"]) == 0, capsys.readouterr()
    config, notes = load_config(str(out)), capsys.readouterr().err
    assert config.data.train == ["a 1.parquet", "a 2.parquet", "a 3.parquet"]
    assert config.data.val == ["b.parquet"] and config.data.max_prompt_tokens == 512
    assert config.run.name == "run #1" and config.rollout.temperature == 0.9
    assert config.objective.kl_coef == 0.01 and config.training.optimizer.lr == 1e-6
    assert "trainer.note=a=b=c" in notes and "A=1" not in notes and "--gpus-per-node=8" in notes


def test_recomputation_chunks_and_offload_of_megatron(tmp_path, capsys):
    given, out = tmp_path / "verl.yaml", tmp_path / "ours.yaml"
    part = "actor_rollout_ref.actor.megatron"
    again = f"+{part}.override_transformer_config"
    given.write_text("algorithm: {adv_estimator: grpo}\n")

    def translated(*settings: str):
        """Return the section training, and the lines of the report about each kind of setting."""
        assert from_verl.main([str(given), "--out", str(out), *settings]) == 0
        return load_config(str(out)).training, capsys.readouterr().err.partition("no counterpart:")

    sizes = (f"{part}.pipeline_model_parallel_size=4", f"{part}.virtual_pipeline_model_parallel_size=2")
    training, _ = translated(*sizes, f"{again}.recompute_granularity=selective")
    assert (training.pp, training.vpp, training.recompute) == (4, 2, "selective")
    assert training.recompute_modules == ["core_attn"]  # verl's default
    chosen = (f"{again}.recompute_granularity=selective", f"{again}.recompute_modules=[mlp,layernorm]")
    training, (_, missing, _) = translated(*chosen)
    assert training.recompute_modules == ["mlp", "layernorm"] and not missing
    whole = [f"{again}.recompute_{name}" for name in ("granularity=full", "num_layers=3", "method=block")]
    training, (notes, _, lines) = translated(*whole, f"{again}.fine_grained_activation_offloading=True")
    assert training.recompute == "full" and "recompute_num_layers=3: all layers of a stage" in notes
    assert "fine_grained_activation_offloading=True: activations stay on the GPU" in lines


def test_grpo_of_one_sample_per_prompt_becomes_reinforce_pp(tmp_path, capsys):
    script, out = tmp_path / "run.sh", tmp_path / "ours.yaml"
    script.write_text(f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {DATA}\n")
    assert from_verl.main([str(script), "--out", str(out)]) == 0
    assert "rollout.n=1 verl's grpo takes the raw score" in capsys.readouterr().err
    assert load_config(str(out)).algorithm == "reinforce_pp"


@pytest.mark.parametrize("model", ["Qwen3.5-35B-A3B", "Qwen3-Next-80B-A3B-Instruct"])
def test_models_with_gated_delta_nets_fit(tmp_path, capsys, model):
    script, out = tmp_path / "run.sh", tmp_path / "ours.yaml"
    part = "actor_rollout_ref.actor.megatron"
    script.write_text(
        f"python3 -m verl.trainer.main_ppo {GRPO} {DATA} trainer.nnodes=8 "
        f"actor_rollout_ref.model.path=Qwen/{model} {part}.tensor_model_parallel_size=2 "
        f"{part}.pipeline_model_parallel_size=2 {part}.expert_model_parallel_size=8 "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4 --config-name=ppo_megatron_trainer\n"
    )
    assert from_verl.main([str(script), "--out", str(out)]) == 0
    text = f"lockstep model text Qwen/{model} --out Qwen/{model}-text"
    assert (text in capsys.readouterr().err) == ("3.5" in model)
    assert load_config(str(out)).training.ep == 8


def test_bounds_of_icepop_and_the_mean_of_gspo_are_kept(tmp_path, capsys):
    given, out = tmp_path / "verl.yaml", tmp_path / "ours.yaml"
    given.write_text(
        "algorithm: {adv_estimator: grpo, rollout_correction: {rollout_is: sequence, "
        "rollout_is_threshold: 0.5_5.0}}\n"
        "actor_rollout_ref: {actor: {policy_loss: {loss_mode: gspo}, "
        "megatron: {context_parallel_size: 2}}}\n"
    )
    assert from_verl.main([str(given), "--out", str(out)]) == 0
    config = load_config(str(out))
    fix = config.rollout_correction
    assert (fix.icepop_low, fix.icepop_high, fix.icepop_level, fix.weighs_samples) == (
        0.5,
        5.0,
        "sample",
        True,
    )
    assert config.objective.aggregation == "token-mean" and config.training.cp == 2
    assert "verl up to 0.9.0 averaged gspo as seq-mean-token-mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, reason",
    [
        ("echo hello", "did not start verl's trainer"),
        ("set -u\nDATA=$((SCALE * 2))", 'error token is "SCALE"'),
        ("python -m verl.trainer.main_ppo algorithm.adv_estimator=mine", "adv_estimator=mine has no"),
        (
            "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
            "algorithm.rollout_correction.rollout_is=group",
            "rollout_is=group has no",
        ),
        (
            "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=x/Qwen3-Omni-30B",
            "Qwen2.5-VL, Qwen3-VL and Qwen3.5 are",
        ),
        (
            "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=x/Qwen3.5-2B "
            "data.train_files=tinyllava-video-r1/train.parquet",
            "videos are not supported",
        ),
        (
            "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor."
            "policy_loss.loss_mode=geo_mean actor_rollout_ref.actor.clip_ratio_low=1.5",
            "clip_ratio_low=1.5 with loss_mode=geo_mean bounds a log-ratio",
        ),
        ("python -m verl.trainer.main_ppo data.truncation=middle", "truncation=middle would cut"),
        ("python -m verl.trainer.main_ppo trainer.n_gpus_per_node=all", "node=all must be a number"),
        (
            "python -m verl.trainer.main_ppo critic.ppo_epochs=2",
            "critic.ppo_epochs=2: the critic learns from the same mini-batches",
        ),
        (
            "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo reward_manager.name=mine",
            "reward_manager=mine has no counterpart",
        ),
        ("python -m verl.trainer.main_ppo --config-path=conf --config-name=mine", "conf/mine.yaml, which is"),
        ("cd $WHERE; $COMMAND data.train_batch_size=4", "did not start verl's trainer"),
        ("python -m verl.trainer.main_ppo actor_rollout_ref.actor.optim.optimizer=muon", "Adam is the only"),
    ],
)
def test_scripts_that_cannot_be_translated_say_why(tmp_path, capsys, text, reason):
    script = Path(tmp_path, "run.sh")
    script.write_text(text + "\n")
    assert from_verl.main([str(script)]) == 2
    assert reason in capsys.readouterr().err

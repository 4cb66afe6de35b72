"""Compilation by vLLM: sizes of CUDA graphs, and a cache that jobs use at the same time."""

import ast
import os
from types import SimpleNamespace

import pytest
import vllm.envs
from vllm.compilation.backends import CompilerManager
from vllm.config import CompilationConfig, VllmConfig

from rl.config.options import ConfigError
from rl.config.rollout import Rollout
from rl.rollout.compilation import graph_sizes, replace_cache_files
from rl.rollout.platforms import Cuda


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9, 16, 100, 256, 1000, 4096])
def test_every_step_has_a_graph_with_little_padding(largest):
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest
    padding = {n: next(size for size in sizes if size >= n) - n for n in range(1, largest + 1)}
    assert all(rows < 8 or rows <= n / 8 for n, rows in padding.items())
    assert len(sizes) <= 60


def test_vllm_takes_the_sizes_above_its_own_limit():
    compilation = CompilationConfig(cudagraph_capture_sizes=graph_sizes(1024), cudagraph_mode="FULL")
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=1024, max_num_batched_tokens=8192),
        uniform_decode_query_len=1,
        performance_mode="balanced",
    )
    VllmConfig._set_cudagraph_sizes(config)
    assert compilation.cudagraph_capture_sizes == graph_sizes(1024)
    assert compilation.max_cudagraph_capture_size == 1024


def test_vllm_has_a_graph_for_every_number_of_samples_with_drafts():
    engine = SimpleNamespace(config=Rollout(max_concurrent_samples=100))
    options = Cuda().draft_options(engine, {"num_speculative_tokens": 3})
    compilation = CompilationConfig(**options["compilation_config"], max_cudagraph_capture_size=400)
    compilation.adjust_cudagraph_sizes_for_spec_decode(4)
    assert compilation.cudagraph_capture_sizes == [4 * samples for samples in graph_sizes(100)]


@pytest.mark.parametrize("tp, on", [(1, False), (2, False), (2, True)])
def test_flashinfer_sums_only_if_the_key_is_on(tp, on, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda tool: f"/bin/{tool}" if on else None)
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_FLASHINFER", "1")
    engine = SimpleNamespace(config=Rollout(tp=tp, flashinfer_all_reduce=on), frozen=False)
    for options in (Cuda().options(engine), Cuda().draft_options(engine, {"num_speculative_tokens": 1})):
        passes = CompilationConfig(**options["compilation_config"]).pass_config
        assert passes.fuse_allreduce_rms is (None if on else False)  # None: vLLM decides
    assert vllm.envs.VLLM_ALLREDUCE_USE_FLASHINFER is on


def test_flashinfer_without_its_compiler_is_refused(monkeypatch):
    monkeypatch.setattr("shutil.which", {"ninja": "/bin/ninja"}.get)
    engine = SimpleNamespace(config=Rollout(tp=2, flashinfer_all_reduce=True), frozen=False)
    with pytest.raises(ConfigError, match="flashinfer_all_reduce=true.*PATH has no nvcc;"):
        Cuda().options(engine)


def test_a_cache_is_replaced_and_not_written_in_place(tmp_path):
    """A reader that opened the index before has the whole old one."""
    replace_cache_files()
    index = tmp_path / "vllm_compile_cache.py"
    index.write_text("{}")
    opened = tmp_path / "opened"
    os.link(index, opened)
    manager = SimpleNamespace(
        disable_cache=False,
        is_cache_updated=True,
        cache={("all", 0, "inductor"): 1},
        cache_file_path=str(index),
    )
    CompilerManager.save_to_file(manager)
    assert opened.read_text() == "{}"
    assert ast.literal_eval(index.read_text()) == manager.cache
    assert sorted(tmp_path.iterdir()) == [opened, index]
    manager.is_cache_updated = False
    CompilerManager.save_to_file(manager)
    assert manager.cache_file_path == str(index)

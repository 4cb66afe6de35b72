"""Contradictions in the section adapter are refused with the value to set."""

import pytest

from rl.config.checks import check
from rl.config.options import ConfigError
from rl.config.schema import load_config
from tests.spawn import ROOT

PPO = str(ROOT / "configs" / "toy" / "ppo.yaml")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["adapter.path=x"], "set adapter.kind to that of the directory"),
        (["adapter.kind=lora", "adapter.path=x", "adapter.init=pissa"], "leave out one of the two"),
        (["adapter.kind=lora", "adapter.dropout=0.1"], "adapter.dropout is 0.1, but must be 0"),
        (["critic.share_base=true"], "set adapter.kind=lora"),
        (["critic.share_base=true", "adapter.kind=lora", "critic.path=x"], "not those of critic.path=x"),
        (["critic.share_base=true", "adapter.kind=lora", "adapter.init=pissa"], "use adapter.init=zero"),
        (["adapter.kind=dora", "adapter.base=fp8"], "use adapter.base=model"),
        (["critic.share_base=true", "adapter.kind=lora", "adapter.base=fp8"], "use adapter.base=model"),
    ],
)
def test_contradictions_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(load_config(PPO, overrides))


def test_a_critic_on_the_base_is_accepted():
    assert check(load_config(PPO, ["critic.share_base=true", "adapter.kind=rslora"])) == []

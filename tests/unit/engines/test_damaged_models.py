"""Damaged model directories are refused at the start by one sentence that names the file and the cause.

Weights with NaN are read later: tests/unit/training/test_fp8_blocks.py.
"""

import re
import shutil

from rl.config.schema import load_config
from rl.engines.inputs import Inputs
from tests.damaged_models import DAMAGES
from tests.toy import SFT, write_config


def refusal(config, number_of_ranks=2) -> str:
    """Return the sentence of the refusal, "" if the directory is accepted, or the defect's type and text."""
    try:
        Inputs(load_config(str(config), []), number_of_ranks)
    except ValueError as error:
        return str(error)
    except Exception as error:
        return f"TRACEBACK {type(error).__name__}: {error}"
    return ""


def test_damaged_models_end_in_a_traceback_or_unseen(toy, tmp_path):
    """22 of them ended in a traceback, 53 were accepted, and one with 10**30 layers was read for ever."""
    wrong = []
    for number, (name, (damage, pattern)) in enumerate(DAMAGES.items()):
        place = tmp_path / str(number)
        model = shutil.copytree(toy / "model", place / "model")
        config = write_config(place, toy, *SFT, f"model.path={model}")
        damage(model)
        text = refusal(config)
        fits = re.search(pattern, text) if pattern else text == ""
        if not fits or "TRACEBACK" in text or "\n" in text or len(text) > 800:
            wrong.append(f"{name}: expected {pattern!r}, found {text[:300]!r}")
        shutil.rmtree(place)
    assert not wrong, "\n".join(wrong)
